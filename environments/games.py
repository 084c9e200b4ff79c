"""
Environments that are games.
"""

from rewards import extract_answer


def guess_letter(conversation: list[dict], answer: str) -> tuple[str | None, float]:
    """Reply "up" or "down": the direction from the tagged guess to the letter in the column `answer`.

    1 point for the letter, -0.1 for every other guess, -0.2 for a turn without a guess.
    """
    guess = extract_answer(conversation[-1]["content"]) or ""
    if guess not in list("abcdefghijklmnopqrstuvwxyz"):
        return "a letter", -0.2
    if guess == answer:
        return None, 1.0
    return "up" if answer > guess else "down", -0.1
