"""
The flags of infer.py, and which of them cannot be combined. Imports no torch: mistakes come at once.
"""

import argparse
from pathlib import Path

from config import GRPOConfig, ModelConfig, TrainingConfig
from runs.command_line import OneLineParser

EXAMPLES = """
  python infer.py --model_path RUN/final --question "47+85=?"
  python infer.py --model_path RUN/final --evaluate arithmetic --limit 256
  python infer.py --report RUN --against OTHER_RUN"""
MODES = "question", "chat", "questions", "evaluate", "merge_into", "report"


def build_parser() -> OneLineParser:
    """Return the parser with every flag."""
    parser = OneLineParser(
        prog="infer.py", allow_abbrev=False, usage=EXAMPLES,
        description="Sample from a model, evaluate it, or write the report of a run.",
    )
    add = parser.add_argument
    add("--model_path", default="", help="folder or hub id, such as RUN/final; empty: a tiny built-in one")
    add("--question", help="print the model's answer to this prompt")
    add("--chat", action="store_true", help="hold a conversation with the model on the console")
    add("--questions", metavar="DATASET", help="answer the prompts of a file, hub id or built-in task")
    add("--answers", metavar="FILE", help="write the answers to --questions there; without it, print them")
    add("--evaluate", metavar="DATASET",
        help="print accuracy and points on the problems of a file, hub id or built-in task")
    add("--reward_functions", nargs="+", default=[], help="for --evaluate: names from rewards.py, or "
        "path/to/file.py:function, whose mean points are printed as well; no answers are needed")
    add("--reward_weights", nargs="+", type=float, default=[], help="one for each; empty: 1 each")
    add("--reward_errors", default="raise", choices=["raise", "none"],
        help="if a reward function or environment raises: stop, or leave unscored [%(default)s]")
    add("--merge_into", metavar="FOLDER", help="add the LoRA adapter to the weights and write them to FOLDER")
    add("--report", metavar="RUN", help="write RUN/report.html: curves, advice, settings, completions")
    add("--against", metavar="RUN", default="", help="another run, shown beside the first one in the report")
    add("--samples", type=int, default=1,
        help="completions per problem [%(default)s]; with several, --evaluate prints pass@k too")
    add("--against_model", metavar="MODEL", default="", help="evaluate it too, and print the difference")
    add("--json", metavar="FILE", default="", help="write the results of --evaluate to FILE")
    add("--split", default="test", help="train, test, or another split of a hub data set [%(default)s]")
    add("--limit", type=int, help="use the first n problems; default 256 for --evaluate, all for --questions")
    add("--prompt_column", default="", help="column with the prompts, or a text with {columns}; empty: usual")
    add("--answer_column", default="", help="column with the correct answers; empty: one of the usual names")
    add("--environment", default="", help="environment that replies to the model: calculator, python, "
        "guess_letter, or path/to/file.py:function")
    add("--max_turns", type=int, default=1, help="most turns of the model in an environment [%(default)s]")
    add("--instruction", default="", help="text put before every prompt, such as how to format the answer")
    add("--generation_max_length", type=int, default=GRPOConfig.generation_max_length,
        help="most new tokens, of all turns together [%(default)s]")
    add("--generation_temperature", type=float, default=1.0,
        help="divides the logits; 0: always the likeliest token [%(default)s]")
    add("--generation_top_p", type=float, default=1.0,
        help="sample from the likeliest tokens up to this probability; 1: all [%(default)s]")
    add("--generation_top_k", type=int, default=0,
        help="sample from the k likeliest tokens; 0: all [%(default)s]")
    add("--generation_batch_size", type=int, default=64, help="completions sampled at once, fewer to save "
        "memory; those of a problem always are [%(default)s]")
    add("--attn_implementation", default="auto", choices=["auto", "sdpa", "eager"],
        help="attention of transformers, where prompts are not shared; auto: sdpa, or eager [%(default)s]")
    add("--precision", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="of the layers; auto: bfloat16 on a GPU or TPU that computes in it, else float32 [%(default)s]")
    add("--trust_remote_code", action="store_true", help="run the Python code that comes with a model")
    add("--device", default="auto", choices=["auto", "cpu"],
        help="auto: a GPU that torch supports, if there is one [%(default)s]")
    add("--chat_template", default="auto", choices=["auto", "none"],
        help="auto: the tokenizer's, if it has one; none: prompts stay as they are [%(default)s]")
    add("--chat_template_kwargs", metavar="JSON", default="", help="variables of the chat template, such as "
        '{"enable_thinking": false}; empty: those of the run that trained the model')
    add("--seed", type=int, default=0, help="of sampling; the same seed gives the same answers [%(default)s]")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Raises ValueError, one line, for mistakes and flags that cannot be combined."""
    args = build_parser().parse_all(argv)
    reject_incompatible(args)
    sampling_config(args).validate_functions()            # and the values
    ModelConfig(chat_template_kwargs=args.chat_template_kwargs)
    TrainingConfig(seed=args.seed)
    return args


def sampling_config(args: argparse.Namespace) -> GRPOConfig:
    """Return the settings of sampling and scoring."""
    chosen = "generation_", "reward_", "environment", "max_turns"
    settings = {name: value for name, value in vars(args).items() if name.startswith(chosen)}
    del settings["generation_batch_size"]                 # a group of --samples may be larger
    return GRPOConfig(**settings | {"reward_functions": args.reward_functions or ["correctness"]})


def reject_incompatible(args: argparse.Namespace) -> None:
    """Raise ValueError, one line, for what the user has to change."""
    modes = [args.question is not None, *(bool(getattr(args, mode)) for mode in MODES[1:])]
    if sum(modes) != 1:
        raise ValueError(f"give one of {', '.join(f'--{mode}' for mode in MODES)}; see --help")
    if args.question is not None and not args.question.strip():
        raise ValueError("--question: is empty; give a prompt")
    if args.answers and not args.questions:
        raise ValueError(f"--answers={args.answers}: needs --questions DATASET")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit={args.limit}: needs at least one problem")
    if args.samples < 1:
        raise ValueError(f"--samples={args.samples}: needs at least one completion per problem")
    if args.generation_batch_size < 1:
        raise ValueError(f"--generation_batch_size={args.generation_batch_size}: needs at least 1")
    if args.samples > 1 and args.generation_temperature == 0:
        raise ValueError(f"--samples={args.samples}: all equal with --generation_temperature=0; try 1")
    if args.samples > 1 and not args.evaluate and not args.questions:
        raise ValueError(f"--samples={args.samples}: needs --evaluate or --questions")
    for name, path in ("json", args.json), ("answers", args.answers):
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"--{name}={path}: the folder {Path(path).parent} does not exist")
        if path and Path(path).is_dir():
            raise ValueError(f"--{name}={path}: is a folder; name a file")
        if path and Path(path).resolve() == Path(args.questions or args.evaluate or "").resolve():
            raise ValueError(f"--{name}={path}: is the file of the problems; name another one")
    for name in "against_model", "json", "reward_functions":
        if getattr(args, name) and not args.evaluate:
            raise ValueError(f"--{name}={getattr(args, name)}: needs --evaluate DATASET")
    if args.reward_weights and not args.reward_functions:
        raise ValueError("--reward_weights: needs --reward_functions, one function for each weight")
    if args.against and not args.report:
        raise ValueError(f"--against={args.against}: needs --report RUN; for two models see --against_model")
