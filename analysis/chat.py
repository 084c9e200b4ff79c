"""
Answers of a model to one prompt, in a conversation, or to a file of prompts, the evaluation of models, and
adapters that are added to their weights. A model that is sampled wrongly is refused, as before training.

Answers are printed with control characters as escapes. With an environment, such as one with tools, an answer
is all messages of the model and the environment up to the user's next turn.

Left out on purpose: serving, and a cache kept between the user's turns: each forwards the whole conversation.
"""

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.evaluation import describe_estimates, measure, summarise
from analysis.infer_flags import sampling_config
from config import DataConfig, GRPOConfig, ModelConfig
from data import as_text, encode_prompt
from engine import make_engine
from engine.devices import best_device
from engine.errors import RunError
from engine.plain import Engine
from engine.precision import resolve_precision
from engine.ranks import Ranks
from environments import closing_environments
from environments.instances import tools_of
from environments.loading import load_environment, refuse_missing_columns
from engine.policy import check_context_length, load_any_policy, move
from environments.messages import encode_turns, with_known_role
from rewards import correctness, is_missing
from reward_functions.loading import load_reward_function, refuse_equal_names, require_columns
from runs.command_line import section_of
from runs.groups import sample_completions
from runs.startup_check import choose_engine, refuse_wrong_sampler
from sources.training_data import instructed, with_instruction
from sample import Rollout, stop_token_ids
from sources import load_examples

CONTROL = re.compile(             # characters that a terminal acts on, but for newline and tab
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def escape(text: str) -> str:
    """Replace control characters by escapes such as \\x1b: a model's text must not control the terminal."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


@dataclass
class ChatModel:
    """Answer prompts with an engine and settings of sampling."""

    engine: Engine
    ranks: Ranks
    config: GRPOConfig          # read are generation_*, environment and max_turns
    seed: int

    @classmethod
    def load(
        cls, model_config: ModelConfig, config: GRPOConfig, seed: int, *, alone: bool = False
    ) -> "ChatModel":
        """Load a model onto its device. alone: for one completion at a time, which shares no prompt."""
        device = best_device(model_config.device)
        model_config = replace(model_config, precision=resolve_precision(model_config.precision, device))
        model, tokenizer = load_any_policy(model_config, trainable=False)
        tokenizer.tools = tools_of(load_environment(config.environment))
        engine, ranks = make_engine("plain", move(model, device), tokenizer), Ranks(device)
        if not alone or device.type == "xla":
            everything = GRPOConfig(generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0)
            engine, _ = choose_engine(engine, ranks, ["1+1=?"], everything)
        refuse_wrong_sampler(engine)
        return cls(engine, ranks, config, seed)

    @property
    def tokenizer(self):
        """Return the model's tokenizer."""
        return self.engine.tokenizer

    def check_length(self, prompts: list) -> None:
        """Raise ValueError if the model's positions are too few for a prompt and its completion."""
        longest = max(len(encode_prompt(self.tokenizer, prompt)) for prompt in prompts)
        check_context_length(self.engine.model, longest, self.config.generation_max_length)

    @closing_environments()
    def sample(self, examples: list[dict], num_completions: int = 1) -> Rollout:
        """Sample completions of the prompts."""
        environment = load_environment(self.config.environment)
        refuse_missing_columns(self.config.environment, environment, examples)
        self.check_length([example["prompt"] for example in examples])
        return sample_completions(
            self.engine, environment, examples, self.config, seed=self.seed, num_completions=num_completions)

    def answer(self, prompt: str | list[dict] | list[int]) -> str | list[dict]:
        """Print and return the answer to one prompt, in a conversation all messages of this turn."""
        rollout = self.sample([{"prompt": prompt}])
        print(escape(as_text(rollout.completions[0])))
        if not rollout.finished[0]:
            print(f"(truncated at --generation_max_length={self.config.generation_max_length})")
        return rollout.completions[0]


def chat(chat_model: ChatModel, instruction: str) -> None:
    """Hold a conversation on the console. An empty line, Ctrl-D or Ctrl-C ends it."""
    print("An empty line ends the conversation.", file=sys.stderr)
    messages: list[dict] = []
    try:
        while text := input("> ").encode(errors="replace").decode().strip():     # no lone surrogates
            messages.append({"role": "user", "content": text})
            try:
                reply = chat_model.answer(encode_conversation(chat_model, messages, instruction))
            except (ValueError, RunError) as error:
                print(f"{error}\n(this message is left out)")
                messages.pop()
                continue
            messages += [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
            chat_model.seed += 1
    except (EOFError, KeyboardInterrupt):
        print()


def encode_conversation(
    chat_model: ChatModel, messages: list[dict], instruction: str = ""
) -> list[dict] | str | list[int]:
    """Return a conversation as a prompt.

    With a chat template these are the messages. Without one it is the first message as text, as with
    --question, or the token ids of all messages, as in training on conversations.
    """
    tokenizer = chat_model.tokenizer
    first, *later = with_instruction(messages, instruction)
    if tokenizer.chat_template:
        return [first, *(with_known_role(tokenizer, message) for message in later)]
    prompt = first["content"]
    if not later:
        return prompt
    stops = stop_token_ids(chat_model.engine.model, tokenizer)
    ids, _ = encode_turns(tokenizer, prompt, later, stops)
    return encode_prompt(tokenizer, prompt) + ids


def answer_questions(args, model_config: ModelConfig) -> None:
    """Write a line of JSON for each answer to --questions into the file --answers, or print it.

    It has the example's columns, completion and finished.
    """
    examples = load_dataset(args, args.questions, args.limit or None)
    chat_model = ChatModel.load(model_config, sampling_config(args), args.seed)
    rollout = chat_model.sample(examples, args.samples)
    answers = zip(rollout.completions, rollout.finished.tolist(), strict=True)
    with open(args.answers, "w", encoding="utf-8") if args.answers else nullcontext(sys.stdout) as file:
        for row, (completion, finished) in enumerate(answers):
            record = examples[row // args.samples] | {"completion": completion, "finished": finished}
            file.write(json.dumps(record, ensure_ascii=not args.answers, default=str) + "\n")
    if args.answers:
        print(f"{args.answers}: {len(rollout.completions)} answers to {len(examples)} prompts")


def run_evaluation(args, model_config: ModelConfig) -> None:
    """Print the estimates of --evaluate, and with --json write them and all problems to a file."""
    functions = [load_reward_function(name) for name in args.reward_functions]
    refuse_equal_names(functions)
    examples = examples_to_evaluate(args, functions)
    results = [measure_model(args, model_config, examples, functions)]
    if args.against_model:
        other = replace(model_config, model_path=args.against_model)
        results.append(measure_model(args, other, examples, functions))
    for result in results:
        if args.against_model:
            print(result["model_path"] or "built-in model")
        print(describe_estimates(result["estimates"], args.samples))
        if not result["tagged"] and result["estimates"].get("accuracy", {}).get("mean") == 0:
            print("no completion has an <answer>...</answer>: ask for it with --instruction", file=sys.stderr)
    chosen = "generation_", "reward_", "environment", "max_turns", "split", "samples", "seed"
    written = {name: value for name, value in vars(args).items() if name.startswith(chosen)}
    written |= {"dataset": args.evaluate, "results": results}
    if args.against_model:
        written["differences"] = summarise(*(result["problems"] for result in results))
        print(f"{args.model_path or 'built-in model'} minus {args.against_model}")
        print(describe_estimates(written["differences"], args.samples))
    if args.json:
        Path(args.json).write_text(json.dumps(written, indent=1) + "\n")


def examples_to_evaluate(args, functions: list) -> list[dict]:
    """Return the examples of --evaluate that can be scored. Raises ValueError if there are none."""
    examples = load_dataset(args, args.evaluate, args.limit or 256)
    refuse_missing_columns(args.environment, load_environment(args.environment), examples)
    require_columns(functions, examples, args.evaluate)
    if functions:
        return examples
    examples = [example for example in examples if not is_missing(example.get("answer"))]
    if not examples:
        fix = "name --reward_functions that need none, or the column with --answer_column"
        raise ValueError(f"--evaluate={args.evaluate}: no example has an answer; {fix}")
    require_columns([correctness], examples, args.evaluate)                      # no objects
    return examples


def measure_model(args, model_config: ModelConfig, examples: list[dict], functions: list) -> dict:
    """Return the result of evaluation.measure, and model_path. Raises RunError if a function fails."""
    loaded = ChatModel.load(model_config, sampling_config(args), args.seed)
    loaded.check_length([example["prompt"] for example in examples])
    return {"model_path": model_config.model_path} | measure(
        loaded.engine, loaded.ranks, examples, loaded.config, seed=args.seed, samples=args.samples,
        reward_functions=functions, environment=load_environment(args.environment),
    )


def load_dataset(args, source: str, limit: int | None) -> list[dict]:
    """Return the examples of a data set with --instruction before each prompt."""
    columns = section_of(args, DataConfig).columns
    examples = load_examples(source, args.split, limit=limit, columns=columns)
    return [instructed(example, args.instruction) for example in examples]
