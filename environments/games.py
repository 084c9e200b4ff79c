"""
Environments that are games.
"""

from reward_functions.answers import extract_answer


# ---- a game ----------------------------------------------------------------------------------------------------------


def guess_letter(conversation: list[dict], answer: str) -> tuple[str | None, float]:
    """Whether the letter to be found, the column `answer`, is up or down from the guess between <answer> tags.

    1 point for finding it, -0.1 for every other guess, -0.2 for a turn without one.
    """
    guess = extract_answer(conversation[-1]["content"]) or ""
    if guess not in list("abcdefghijklmnopqrstuvwxyz"):
        return "a letter", -0.2
    if guess == answer:
        return None, 1.0
    return "up" if answer > guess else "down", -0.1
