"""
Conversations with an environment, and advantages of tokens from a value head (GAE).

    .venv/bin/python examples/conversation.py             the built-in Gemma guesses letters, no downloads
    python train.py examples/conversation.json            the same run, with the game of environments/games.py

The environment is a function of the conversation so far. The columns that its parameters name come from the
example; it returns the next message, or None to end the conversation, and points for the last turn.
"""

from train import Config, GRPOConfig, TrainingConfig, train


def guess_letter(conversation, answer):
    """Reply "up" or "down" to a guess; a right one earns 1 point, less 0.1 for each guess before it."""
    turns = [message["content"] for message in conversation if message["role"] == "assistant"]
    guess = turns[-1].partition("<answer>")[2].partition("</answer>")[0].strip()
    if guess == answer:
        return None, 1.0 - 0.1 * (len(turns) - 1)
    return ("up" if guess < answer else "down"), 0.0


config = Config(
    grpo=GRPOConfig(use_value_head=True), training=TrainingConfig(use_grpo=True, profile="guess_letter")
)
model, tokenizer = train(config, environment=guess_letter)
