"""
The procedural tasks of the package reasoning-gym (https://github.com/open-thought/reasoning-gym), and their
scorers. The package is optional.

    --dataset reasoning_gym:chain_sum,countdown
    --dataset "reasoning_gym:chain_sum?min_terms=2&max_terms=3&size=500"        options of the task
"""

import json
import random
import re
from collections.abc import Callable
from contextlib import suppress

from config import DEFAULT_REWARDS
from data import demonstration
from rewards import extract_answer, text_of
from sources import GYM

SEEDS = {"train": 0, "test": 2**30}     # a task adds a problem's number to its seed


def package():
    """Return the package. Raises ValueError if it is missing."""
    with suppress(ImportError):
        import reasoning_gym

        return reasoning_gym
    raise ValueError(f"{GYM} the package is missing; pip install reasoning-gym")


def split_tasks(source: str) -> list[tuple[str, dict]]:
    """Return the name and the options of each task in a source. A value is JSON or text."""
    tasks = []
    for text in re.split(r",(?![^\[]*\])", source.removeprefix(GYM)):            # not at a comma in a list
        name, _, pairs = text.partition("?")
        options = dict(pair.partition("=")[::2] for pair in pairs.split("&") if pair)
        for key, value in options.items():
            with suppress(ValueError):
                options[key] = json.loads(value)
        tasks.append((name, options))
    return tasks


def gym_examples(source: str, split: str, seed: int) -> list[dict]:
    """Return the problems of all tasks, shuffled. `entry` is the argument of the package's scorer."""
    if split not in SEEDS:
        raise ValueError(f"{source}: there is no split {split}; it has train and test")
    create, examples = package().create_dataset, []
    for task, options in split_tasks(source):
        try:
            entries = create(task, **{"size": 1000} | options, seed=SEEDS[split])
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"{GYM}{task}: {error or 'an option is out of its bounds'}") from None
        for entry in entries:
            completion = demonstration("", entry["answer"]) if entry["answer"] else None
            examples.append(dict(prompt=entry["question"], completion=completion, task=task, entry=entry))
    random.Random(seed).shuffle(examples)
    return examples


def implied_rewards(source: str) -> dict:
    """Return the reward flags that a source of tasks implies: each task's scorer replaces correctness."""
    scorers, (_, *others) = [GYM + task for task in dict(split_tasks(source))], DEFAULT_REWARDS
    weights = [1.0] * len(scorers) + [DEFAULT_REWARDS[name] for name in others]
    return {"reward_functions": scorers + others, "reward_weights": weights}


def scorer(name: str) -> Callable:
    """Return the reward function of a task: the package's score of the answer, 0 to 1; 0 if it raises, and
    None for problems of other tasks.
    """
    wanted = name.removeprefix(GYM)
    score_answer = package().get_score_answer_fn(wanted)

    def score(completions, task, entry, **columns) -> list[float | None]:
        rewards = []
        for completion, its_task, problem in zip(completions, task, entry, strict=True):
            reward, answer = 0.0, extract_answer(text_of(completion))
            with suppress(Exception):
                reward = float(score_answer(answer=answer, entry=problem)) if answer else 0.0
            rewards.append(reward if its_task == wanted else None)
        return rewards

    score.__name__ = name
    return score
