"""
Sample from a model, evaluate it, or write the report of a run. The flags are in analysis/infer_flags.py.

    python infer.py --model_path outputs/demo/final --question "47+85=?"
    python infer.py --model_path outputs/demo/final --chat --environment calculator --max_turns 4
    python infer.py --model_path outputs/demo/final --questions problems.jsonl --answers out.jsonl --samples 4
    python infer.py --model_path outputs/demo/final --evaluate arithmetic --against_model outputs/sft/final
    python infer.py --report outputs/demo [outputs/other ...]
"""

import sys
from functools import partial
from pathlib import Path

from runs.command_line import exit_on_mistake, section_of  # first, see runs/__init__.py

from analysis.chat import ChatModel, answer_questions, chat, run_evaluation
from analysis.infer_flags import parse_arguments, sampling_config
from analysis.report import compare_runs, write_report
from config import ModelConfig
from engine.devices import keep_freed_memory, leave_busy_cores
from environments.loading import load_environment
from sources.training_data import with_instruction


def main(argv: list[str]) -> None:
    """Run the mode that the command line chooses."""
    args = parse_arguments(argv)
    if args.report:
        folders = [Path(folder) for folder in args.report]
        print(compare_runs(folders) if len(folders) > 1 else write_report(folders[0]))
        return
    load_environment(args.environment)                    # reports mistakes in it before a model is loaded
    for path in filter(None, (args.answers, args.json)):
        open(path, "a").close()                           # raises OSError now, not after all samples
    model_config = section_of(args, ModelConfig)
    if not args.model_path:
        print("no --model_path: this is the built-in model with random weights, untrained", file=sys.stderr)
    keep_freed_memory()                                   # to use it again, as glibc alone would not
    leave_busy_cores(partial(print, file=sys.stderr))
    if args.evaluate:
        run_evaluation(args, model_config)
    elif args.questions:
        answer_questions(args, model_config)
    else:
        chat_model = ChatModel.load(model_config, sampling_config(args), args.seed, alone=True)
        if args.chat:
            chat(chat_model, args.instruction)
        else:
            chat_model.answer(with_instruction(args.question, args.instruction))


if __name__ == "__main__":
    with exit_on_mistake("infer.py"):
        main(sys.argv[1:])
