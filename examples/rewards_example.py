"""
Reward functions of one's own, and their points for some completions.

    .venv/bin/python examples/rewards_example.py
    python train.py --use_grpo --reward_functions correctness examples/rewards_example.py:brevity
    python train.py --use_grpo --check --reward_functions examples/rewards_example.py:closeness

A reward function gets lists with one entry per completion: the completions, and the columns of the data that
its parameters name. It returns points, and None where it cannot score.
"""

from rewards import correctness, extract_answer, text_of


def brevity(completions, answer, **columns):
    """Give a right answer 1 point, falling to 0 at 1000 characters, other texts 0: to be short is not to be right."""
    return [right and max(0.0, 1 - len(text_of(completion)) / 1000)
            for completion, right in zip(completions, correctness(completions, answer), strict=True)]


def closeness(completions, answer, **columns):
    """Give 1 / (1 + distance) points to a number near the answer, 0 to no number, None without an answer."""
    return [None if truth is None else points_for(extract_answer(text_of(completion)), float(truth))
            for completion, truth in zip(completions, answer, strict=True)]


def points_for(guess, truth):
    """A model may write anything between the tags: what is no number earns nothing."""
    try:
        distance = abs(float(guess) - truth)
    except (TypeError, ValueError):
        return 0.0
    return 1 / (1 + distance) if distance >= 0 else 0.0   # nan is no distance


if __name__ == "__main__":
    texts = ["<answer>132</answer>", "<reasoning>7+5=12</reasoning><answer>132</answer>", "<answer>130</answer>", ""]
    for function in brevity, closeness:
        print(function.__name__, [round(points, 3) for points in function(texts, answer=["132"] * len(texts))])
