"""
Built-in tasks with demonstrations: countdown and a guessing game, beside the addition problems of data.py.

Each function takes a split, "train" or "test", and a seed for the order, and returns examples as in data.py.
The seed never changes which problems are held out for testing.
"""

import random

from data import arithmetic, choose_split, demonstration


def countdown_problems(split: str, seed: int) -> list[dict]:
    """Return problems "make a target of 10 to 99 from three numbers of 1 to 25 with + - * /": 9000 and 1000.

    A problem may have several solutions, so there is no column `answer`. It is generated from one of them,
    whose intermediate results are positive integers.
    """
    generator, problems = random.Random("which problems there are"), {}
    while len(problems) < 10_000:
        numbers = [generator.randint(1, 25) for _ in range(3)]
        steps, expression, target = random_expression(numbers, generator)
        if 10 <= target <= 99:                      # the same numbers in another order are the same problem
            problems.setdefault((*sorted(numbers), target), {
                "prompt": f"Make {target} from {', '.join(map(str, numbers))} with + - * /, each once.",
                "numbers": numbers, "target": target, "completion": demonstration(steps, expression),
            })
    return choose_split(list(problems.values()), 1000, split, seed)


def random_expression(numbers: list[int], generator: random.Random) -> tuple[str, str, int]:
    """Combine two numbers at a time until one is left: ("3*4=12 12+7=19", "(3*4)+7", 19)."""
    parts, steps = [(number, str(number)) for number in numbers], []
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(generator.randrange(len(parts))) for _ in range(2))
        results = {"+": a + b, "*": a * b}
        results |= ({"-": a - b} if a > b else {}) | ({"/": a // b} if a % b == 0 else {})
        sign = generator.choice(list(results))
        steps.append(f"{a}{sign}{b}={results[sign]}")
        parts.append((results[sign], f"({left}{sign}{right})"))
    ((value, expression),) = parts
    return " ".join(steps), expression[1:-1], value


def guess_letter_games(split: str, seed: int) -> list[dict]:
    """Return games of guessing a letter in a range of 8 to 16: 108 ranges to train on, 27 to test on.

    Each demonstration guesses at random among the letters that are still possible, until it is right.
    """
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    ranges = [alphabet[low : low + size] for size in range(8, 17) for low in range(len(alphabet) - size + 1)]
    random.Random("which ranges are held out").shuffle(ranges)
    problems = [(span, letter) for span in ranges for letter in span]
    held_out = sum(map(len, ranges[:27]))
    return [
        {"prompt": f"{span[0]}-{span[-1]}?", "answer": letter, "completion": random_guesses(span, letter)}
        for span, letter in choose_split(problems, held_out, split, seed)
    ]


def random_guesses(possible: str, letter: str) -> list[dict]:
    """Return the messages of a game, by the policy and the environment, for guess_letter_games."""
    generator, messages, guess = random.Random(f"{possible} {letter}"), [], ""
    while guess != letter:
        guess = generator.choice(possible)
        messages.append({"role": "assistant", "content": f"<answer>{guess}</answer>"})
        if guess != letter:
            messages.append({"role": "user", "content": "up" if letter > guess else "down"})
        possible = "".join(c for c in possible if (c > guess) == (letter > guess) and c != guess)
    return messages


PROBLEMS = {"arithmetic": arithmetic, "countdown": countdown_problems, "guess_letter": guess_letter_games}
