"""
The table of `train.py --check`: rewards of completions that are right, wrong, empty or list several answers,
and warnings about suspicious rewards.
"""

import math
import re
from collections.abc import Callable
from itertools import islice

from data import as_text, demonstration
from experience import Groups
from reward_functions.answers import as_list
from rewards import as_number, text_of
from runs.groups import Scoring, score
from sample import demonstrations_as_rollout

KINDS = "gold", "empty", "wrong", "form", "spam", "newline"     # columns of the table, see docs/rewards.md
EXAMPLES = 16                   # number of examples in the table
# A prompt with choices, a line each or with parentheses. Sentences that end in "jar A." are no choices.
LETTERED = re.compile(r"(?msi)^\s*A[.:]\s?\S.*^\s*B[.:]\s?\S|(?<!\w)A\)\s?\S.*(?<!\w)B\)\s?\S")


def completions_of(example: dict, other: dict | None = None) -> dict[str, str]:
    """Return a text of each kind for an example; without a gold answer only empty, wrong and form.

    other  another example, whose gold is wrong here. For a conversation, the texts are its last turn
    """
    answer, gold = example.get("answer"), text_of(example.get("completion") or "")
    answer = answer[0] if isinstance(answer, list) and answer else answer
    answer = None if isinstance(answer, list | dict | None) else str(answer)
    gold = gold or (demonstration("because", answer) if answer else "")
    wrong = text_of((other or {}).get("completion") or "I do not know.")
    if answer and gold:
        changed = re.sub(r"\d{1,9}", lambda digits: str(2 * int(digits[0]) + 7), answer, count=1)
        wrong_answer = changed if changed != answer else f"not {answer}"
        if "<answer>" in gold:
            wrong = gold.partition("<answer>")[0] + f"<answer>{wrong_answer}</answer>"
        else:
            head, found, tail = gold.rpartition(answer)
            wrong = head + wrong_answer + tail if found else wrong_answer
    wrong = str(example.get("wrong") or wrong)
    texts = {"empty": "", "wrong": wrong, "form": demonstration("...", "...")}
    if gold:
        texts |= {
            "gold": gold, "spam": f"{wrong}\n{gold}\n{wrong}",
            "newline": re.sub(r"(<(?:reasoning|think)>\S*) ", r"\1\n", gold, count=1),
        }
    return texts


def lint(
    functions: list[Callable], grpo_config, examples: list[dict], model, tokenizer,
    sampled: Groups | None = None,
) -> tuple[list[str], list[str]]:
    """Score the kinds of completions of examples as a run scores sampled completions. Return the lines of
    the table (mean rewards by function and kind), and warnings about their sum.

    sampled  groups of the model, for another column
    """
    kinds, rows = [], []
    for i, example in enumerate(examples):
        for kind, text in completions_of(example, examples[i - 1] if i else None).items():
            kinds.append(kind)
            rows.append(example | {"completion": text})
    rollout = demonstrations_as_rollout(model, tokenizer, rows)
    groups = score(rollout, rows, Scoring(functions, grpo_config.weights), grpo_config)
    columns = [*KINDS, *(["model"] if sampled else [])]
    table = [f"| reward | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    of_model = sampled.per_function | {"total": sampled.scores} if sampled else {}
    for name, values in (groups.per_function | {"total": groups.scores}).items():            # (rows, 1)
        means = {kind: float(values[[k == kind for k in kinds]].nanmean()) for kind in KINDS}
        shown = means | ({"model": float(of_model[name].nanmean())} if sampled else {})
        cells = [f"{mean:.2f}".replace("nan", "") for mean in shown.values()]
        table.append(f"| `{name}` | {' | '.join(cells)} |")
    return table, flags_of({kind: mean for kind, mean in means.items() if not math.isnan(mean)})  # of total


def flags_of(means: dict[str, float]) -> list[str]:
    """Return a warning for each suspicious order of mean rewards by kind."""
    if not means:
        raise ValueError("--reward_functions: they score no completion; does the data have their columns?")
    if len(means) > 1 and max(means.values()) - min(means.values()) < 1e-9:
        return [f"every completion gets {max(means.values()):g}, so all advantages would be 0"]

    def above(limit: float, *kinds: str) -> str:
        found = [kind for kind in kinds if means.get(kind, -math.inf) > limit]
        return ", ".join(f"{kind} ({means[kind]:.2f})" for kind in found)

    flags = []
    gold, wrong, newline = (means.get(kind, math.inf) for kind in ("gold", "wrong", "newline"))
    if found := above(gold - 1e-9, "empty", "wrong", "form", "spam"):
        flags.append(f"not less than gold ({gold:.2f}): {found}")
    if found := above(wrong + 1e-9, "empty", "form", "spam"):
        flags.append(f"more than wrong ({wrong:.2f}): {found}")
    if gold > newline + 1e-9:
        flags.append(f"gold with a newline in it gets less ({newline:.2f}) than without ({gold:.2f})")
    return flags


def doubtful_answers(examples: list[dict]) -> list[str]:
    """Return a warning for each kind of answer that may be misread, which the table cannot show."""
    rows = [(row["answer"], row["prompt"]) for row in examples if isinstance(row.get("answer"), str)]
    numbers = [(answer, as_text(prompt)) for answer, prompt in rows if as_number(answer) is not None]
    kinds = {
        "have several lines": [answer for answer, _ in rows if "\n" in answer.strip()],
        "are the text of a list": [answer for answer, _ in rows if as_list(answer) is not None],
        "are numbers while the prompt offers letters": [n for n, text in numbers if LETTERED.search(text)],
    }
    advice = "is that meant? If not, choose another --answer_column"
    return [f"{len(found)} of {len(examples)} answers {kind}, such as {found[0]!r:.60}: {advice}"
            for kind, found in kinds.items() if found]


def print_rewards(run, sampled: Groups | None = None) -> None:
    """Print the table of a run, unless it has conversations or trains on a teacher without rewards."""
    plan, grpo_config, policy = run.plan, run.config.grpo, run.policy
    if plan.reward_functions and not plan.environment and grpo_config.reward_functions != ["none"]:
        examples = list(islice(plan.data.train_set, EXAMPLES))
        table, flags = lint(
            plan.reward_functions, grpo_config, examples, policy.model, policy.tokenizer, sampled)
        flags += doubtful_answers(plan.data.train_set)
        run.console.print("\n".join([*table, *(f"- {flag}" for flag in flags)]))
