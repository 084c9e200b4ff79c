"""
Asking a model: one question, a conversation, or a file of prompts.

Answers appear word by word while they are sampled, the reasoning set apart. With an environment, for instance one with tools,
an answer is everything that the model and the environment say to each other until it is the user's turn again.

Left out on purpose: serving, and a cache that is kept between the user's turns: each begins with the whole conversation.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TextStreamer

from config import GRPOConfig, ModelConfig
from data import encode_demonstration, encode_prompt, with_instruction
from engine.chat_template import as_text
from engine.devices import best_device
from environments.loading import load_environment, refuse_missing_columns, responders
from model import load_policy, move, refuse_too_long
from runs.startup_check import can_share_prompts
from sample import Rollout, sample_completions_for_prompts, stop_token_ids

AT_ONCE = 64                    # prompts of a file, before their answers are written down
SHOWN_AS = {                    # what is shown in place of a tag
    "<reasoning>": "reasoning: ", "</reasoning>": "\n", "<think>": "reasoning: ", "</think>": "\n",
    "<answer>": "answer: ", "</answer>": "",
}


class Words(TextStreamer):
    """Prints an answer while its tokens come in. Words come whole, and so do tags, which have no space in them."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        for tag, shown in SHOWN_AS.items():
            text = text.replace(tag, shown)
        print(text, end="\n" if stream_end else "", flush=True)


@dataclass
class ChatModel:
    """A model that answers."""

    model: torch.nn.Module
    tokenizer: object
    config: GRPOConfig          # generation_*, environment and max_turns count
    seed: int
    shared_prompt: bool         # as for sample_completions_for_prompts

    @classmethod
    def load(cls, source: ModelConfig, config: GRPOConfig, seed: int) -> "ChatModel":
        model, tokenizer = load_policy(source)
        tokenizer.tools = getattr(load_environment(config.environment), "tools", None)
        move(model, best_device())
        return cls(model, tokenizer, config, seed, can_share_prompts(model, tokenizer, "1+1=?"))

    def sample(self, examples: list[dict], num_completions: int = 1, on_tokens=None) -> Rollout:
        """Answers to the prompts of some examples. Raises ValueError in one line where the model is too small for them."""
        environment = load_environment(self.config.environment)
        refuse_missing_columns(self.config.environment, environment, examples)
        longest = max(len(encode_prompt(self.tokenizer, example["prompt"])) for example in examples)
        refuse_too_long(self.model, longest, self.config.generation_max_length)
        return sample_completions_for_prompts(
            self.model, self.tokenizer, [example["prompt"] for example in examples], self.config, seed=self.seed,
            num_completions=num_completions, shared_prompt=self.shared_prompt, responders=responders(environment, examples),
            on_tokens=on_tokens,
        )

    def answer(self, prompt: str | list[dict] | list[int]) -> str | list[dict]:
        """The answer to one prompt, printed while it is sampled; what is said in several turns, when it is complete."""
        words = None if self.config.environment else Words(self.tokenizer, skip_special_tokens=True)
        rollout = self.sample([{"prompt": prompt}], on_tokens=words and words.put)
        if words:
            words.end()
        else:
            print(as_text(rollout.completions[0]))
        if not rollout.finished[0]:
            print(f"(cut off at --generation_max_length={self.config.generation_max_length})")
        return rollout.completions[0]


def chat(speaker: ChatModel, instruction: str) -> None:
    """A conversation on the console. An empty line, Ctrl-D or Ctrl-C ends it."""
    print("An empty line ends the conversation.", file=sys.stderr)
    messages: list[dict] = []
    try:
        while text := input("> ").strip():
            if not messages:
                text = with_instruction({"prompt": text}, instruction)["prompt"]
            messages.append({"role": "user", "content": text})
            said = speaker.answer(prompt_of(messages, speaker))
            messages += [{"role": "assistant", "content": said}] if isinstance(said, str) else said
            speaker.seed += 1
    except (EOFError, KeyboardInterrupt):
        print()


def prompt_of(messages: list[dict], speaker: ChatModel) -> list[dict] | str | list[int]:
    """What a conversation so far is asked as: messages, if there is a chat template for them. Without one the first turn is
    the text that --question would send, and later ones are lines of text behind it, as training on conversations has them.
    """
    if speaker.tokenizer.chat_template:
        return messages
    prompt, later = messages[0]["content"], messages[1:]
    if not later:
        return prompt
    ids, _ = encode_demonstration(speaker.tokenizer, prompt, later, stop_token_ids(speaker.model, speaker.tokenizer))
    return encode_prompt(speaker.tokenizer, prompt) + ids


def answer_file(speaker: ChatModel, examples: list[dict], num_completions: int, target: Path) -> None:
    """Write a line of JSON for each answer: the example's columns, completion and finished; every AT_ONCE prompts."""
    with target.open("w", encoding="utf-8") as file:
        for start in range(0, len(examples), AT_ONCE):
            some = examples[start : start + AT_ONCE]
            rollout = speaker.sample(some, num_completions)
            for row, (completion, finished) in enumerate(zip(rollout.completions, rollout.finished.tolist(), strict=True)):
                record = some[row // num_completions] | {"completion": completion, "finished": finished}
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            file.flush()
