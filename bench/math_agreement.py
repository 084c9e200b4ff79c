"""
How far correctness, math_equality and check_answer agree on the answers of GSM8K, and on other ways to write them.

    python bench/math_agreement.py ../shared/data/gsm8k/train.jsonl

Each gold answer (commas removed) is compared with a completion that has it in each of the spellings below.
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from data import demonstration
from reward_functions.loading import BUILT_IN
from sources import load_examples

FUNCTIONS = {"correctness": 1.0, "math_equality": 1.0, "check_answer": 3.0}          # and what they give to a right answer
SPELLINGS = {
    "as it is": lambda answer: answer,
    "with commas": lambda answer: f"{int(answer):,}" if answer.lstrip("-").isdecimal() else answer,
    "in dollars": lambda answer: f"${answer}.00",
    "dollars in words": lambda answer: f"{answer} dollars",
    "decimal point": lambda answer: f"{answer}.0",
    "plus one": lambda answer: str(int(float(answer)) + 1),
    "negative": lambda answer: f"-{answer}",
    "in LaTeX": lambda answer: f"\\boxed{{{answer}}}",
    "twice over two": lambda answer: f"\\frac{{{2 * int(float(answer))}}}{{2}}",
}
HAND_MADE = [  # given, truth, whether they are equal
    ("1,234", "1234", True), ("$18.00", "18", True), ("18 dollars", "18", True), ("3/4", "0.75", True),
    ("3/4", "\\frac{3}{4}", True), ("-7", "-7", True), ("\u2212" + "7", "-7", True), ("7", "-7", False), ("-(-7)", "7", True),
    ("75%", "0.75", True), ("75%", "75", True), ("1e3", "1000", True), ("10^3", "1000", True), ("\\sqrt{16}", "4", True),
    ("2x+2", "2(x+1)", True), ("(1, 2)", "(1,2)", True), ("{1, 2}", "{2, 1}", True),
    ("12.5", "12.50", True), ("0.333", "1/3", False), ("x = 5", "5", True), ("five", "5", False),
    ("18 or 19", "18", False), ("1,23", "123", False), ("", "0", False),
]


def agreement(examples: list[dict]) -> list[str]:
    """Lines of a table: share that each function finds right, by spelling."""
    lines = [f"| {len(examples)} answers, spelled | {' | '.join(FUNCTIONS)} |", "|---" * (len(FUNCTIONS) + 1) + "|"]
    answers = [example["answer"] for example in examples]
    for name, spell in SPELLINGS.items():
        completions = [demonstration("because", spell(answer)) for answer in answers]
        shares = []
        for function, right in FUNCTIONS.items():
            points = BUILT_IN[function](completions, answer=answers)
            shares.append(f"{sum(p == right for p in points) / len(points):.4f}")
        lines.append(f"| {name} | {' | '.join(shares)} |")
    return lines


def by_hand() -> list[str]:
    """Lines of a table: what each function says of single answers."""
    lines = [f"| given | truth | equal | {' | '.join(FUNCTIONS)} |", "|---" * (len(FUNCTIONS) + 3) + "|"]
    for given, truth, equal in HAND_MADE:
        completion = [demonstration("because", given)]
        verdicts = [BUILT_IN[name](completion, answer=[truth])[0] == right for name, right in FUNCTIONS.items()]
        words = ["yes" if verdict else "no" for verdict in (equal, *verdicts)]
        lines.append(f"| `{given}` | `{truth}` | {' | '.join(words)} |")
    return lines


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gsm8k = load_examples(sys.argv[1])
    print("\n".join(["", *agreement(gsm8k), "", *by_hand()]))
