"""
The procedural tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym), and their
scorers. The package is optional.

    --dataset reasoning_gym:chain_sum,countdown
    --dataset "reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=500"        options of the task
"""

import dataclasses
import json
import random
import re
from collections.abc import Callable

from config import DEFAULT_REWARDS
from data import demonstration
from rewards import extract_answer, text_of
from sources import GYM

SIZE = 1000                     # problems of a task and split, without the option size
SEEDS = {"train": 0, "test": 2**30}     # a task adds a problem's number to its seed


def package():
    """Return the package. Raises ValueError, in one line, where it is missing."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(f"{GYM} its tasks are in a package; pip install reasoning-gym") from None
    return reasoning_gym


def tasks_of(source: str) -> dict[str, dict]:
    """Return the options of each task in a source. Raises ValueError for an unknown task or option."""
    known, tasks = package().factory.DATASETS, {}
    for text in split_tasks(source):
        name, _, options = text.partition("?")
        if name not in known:
            raise ValueError(f"{GYM}{name}: there is no such task; there are {', '.join(sorted(known))}")
        if name in tasks:
            raise ValueError(f"{GYM}{name}: is named twice; name it once, with all its options")
        pairs = (option.partition("=") for option in options.split("&") if option)
        tasks[name] = {key: read(value) for key, _, value in pairs}
        names = {field.name for field in dataclasses.fields(known[name][1])} - {"seed"}
        if unknown := sorted(tasks[name].keys() - names):
            raise ValueError(f"{GYM}{name}: no option {unknown[0]}; there are {', '.join(sorted(names))}")
    return tasks


def split_tasks(source: str) -> list[str]:
    """Return the tasks of a source with their options; a list in JSON may have commas."""
    return re.split(r",(?![^\[]*\])", source.removeprefix(GYM))


def read(value: str):
    """Return the value of an option: a number, true, a list in JSON, or text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def gym_examples(source: str, split: str, seed: int) -> list[dict]:
    """Return the problems of all tasks, mixed. A demonstration is the tagged answer without reasoning.

    Columns: prompt, completion, task, and entry, which is what the package's scorer takes.
    """
    if split not in SEEDS:
        raise ValueError(f"{source}: there is no split {split}; it has train and test")
    examples = []
    for task, options in tasks_of(source).items():
        try:
            entries = package().create_dataset(task, **{"size": SIZE} | options, seed=SEEDS[split])
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"{GYM}{task}: {error or 'an option is out of its bounds'}") from None
        for entry in entries:
            completion = demonstration("", entry["answer"]) if entry["answer"] else None
            examples.append(dict(prompt=entry["question"], completion=completion, task=task, entry=entry))
    random.Random(seed).shuffle(examples)
    return examples


def implied_rewards(source: str) -> dict:
    """Return the flags of rewards that a source of tasks implies: each task's scorer in place of correctness,
    so that an evaluation has a line for each task.
    """
    tasks = dict.fromkeys(text.partition("?")[0] for text in split_tasks(source))
    scorers, (_, *others) = [GYM + task for task in tasks], DEFAULT_REWARDS
    weights = [1.0] * len(scorers) + [DEFAULT_REWARDS[name] for name in others]
    return {"reward_functions": scorers + others, "reward_weights": weights}


def scorer(name: str) -> Callable:
    """Return the reward function of a task: the points, 0 to 1, that the package gives to the tagged answer.

    None for problems of other tasks; 0 where the scorer raises, since a model may write anything.
    """
    (wanted,) = tasks_of(name)
    score_answer = package().get_score_answer_fn(wanted)

    def score(completions, task, entry, **columns) -> list[float | None]:
        answers = [extract_answer(text_of(completion)) for completion in completions]
        return [score_one(*row) if name == wanted else None
                for name, *row in zip(task, answers, entry, strict=True)]

    def score_one(answer: str | None, entry: dict) -> float:
        try:
            return float(score_answer(answer=answer, entry=entry)) if answer else 0.0
        except Exception:
            return 0.0

    score.__name__ = GYM + wanted
    return score
