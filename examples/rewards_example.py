"""
Your own reward functions, and their rewards for some completions.

    .venv/bin/python examples/rewards_example.py
    python train.py --use_grpo --reward_functions correctness examples/rewards_example.py:brevity
    python train.py --use_grpo --check --reward_functions examples/rewards_example.py:closeness

A reward function gets lists with one entry per completion: the completions, and the columns of the data that
its parameters name. It returns one number per completion, or None where it cannot judge one.
"""

from rewards import correctness, extract_answer, text_of


def brevity(completions, answer, **columns):
    """Return 1 - length / 1000, at least 0, for a right answer; 0 for other texts, however short.

    The result is None where the data has no answer.
    """
    return [right and max(0.0, 1 - len(text_of(completion)) / 1000)
            for completion, right in zip(completions, correctness(completions, answer), strict=True)]


def closeness(completions, answer, **columns):
    """Return 1 / (1 + distance from the answer) for a number, 0 for other texts, None without an answer."""
    return [None if truth is None else reward_of(extract_answer(text_of(completion)), float(truth))
            for completion, truth in zip(completions, answer, strict=True)]


def reward_of(guess, truth):
    """Return 1 / (1 + distance), 0 if the guess is not a number: models may write anything in the tags."""
    try:
        distance = abs(float(guess) - truth)
    except (TypeError, ValueError):
        return 0.0
    return 1 / (1 + distance) if distance >= 0 else 0.0   # not if it is NaN


if __name__ == "__main__":
    texts = ["<answer>132</answer>", "<reasoning>7+5=12</reasoning><answer>132</answer>", "<answer>130</answer>", ""]
    for function in brevity, closeness:
        print(function.__name__, [round(reward, 3) for reward in function(texts, answer=["132"] * len(texts))])
