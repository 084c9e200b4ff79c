"""
Problems that need no file and no network: sums, countdown and a game of guessing, each with demonstrations.

A function here takes a split, "train" or "test", and a seed for the order, and gives examples as data.py has them. Which
problems are held out for the test never changes.
"""

import random


def arithmetic(split: str, seed: int) -> list[dict]:
    """Sums of two numbers below 100: 9000 problems to train on, 1000 others to test on."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random("which problems are held out").shuffle(problems)
    problems = problems[1000:] if split == "train" else problems[:1000]
    random.Random(seed).shuffle(problems)
    return [
        {"prompt": f"{a}+{b}=?", "answer": str(a + b), "completion": demonstration(column_sums(a, b), str(a + b))}
        for a, b in problems
    ]


def column_sums(a: int, b: int) -> str:
    """Addition as it is done on paper: 47+85 is "7+5=12 4+8=12 12+1=13", from which 132 can be read off."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = f" {tens}+1={tens + 1}" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}={tens}{carry}"


def countdown(split: str, seed: int) -> list[dict]:
    """Make a target of 10 to 99 from three numbers of 1 to 25 with + - * /: 9000 problems to train on, 1000 others to test on.

    A problem has the columns `numbers` and `target`, for the reward function of the same name. It has many answers, so there
    is no column `answer`. Problems are made from an answer, so that each has one, through whole numbers above 0.
    """
    draws, problems = random.Random("which problems there are"), {}
    while len(problems) < 10_000:
        numbers = [draws.randint(1, 25) for _ in range(3)]
        steps, expression, target = random_expression(numbers, draws)
        if 10 <= target <= 99:                            # the same numbers in another order are the same problem
            problems.setdefault((*sorted(numbers), target), {
                "prompt": f"Make {target} from {', '.join(map(str, numbers))} with + - * /, each once.", "numbers": numbers,
                "target": target, "completion": demonstration(steps, expression),
            })
    chosen = list(problems.values())[1000:] if split == "train" else list(problems.values())[:1000]
    random.Random(seed).shuffle(chosen)
    return chosen


def random_expression(numbers: list[int], draws: random.Random) -> tuple[str, str, int]:
    """Combine two numbers at a time until one is left: ("3*4=12 12+7=19", "(3*4)+7", 19)."""
    parts, steps = [(number, str(number)) for number in numbers], []
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(draws.randrange(len(parts))) for _ in range(2))
        results = {"+": a + b, "*": a * b} | ({"-": a - b} if a > b else {}) | ({"/": a // b} if a % b == 0 else {})
        sign = draws.choice(list(results))
        steps.append(f"{a}{sign}{b}={results[sign]}")
        parts.append((results[sign], f"({left}{sign}{right})"))
    ((value, expression),) = parts
    return " ".join(steps), expression[1:-1], value


def demonstration(reasoning: str, answer: str) -> str:
    """The form that the format rewards look for."""
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


def guess_letter(split: str, seed: int) -> list[dict]:
    """Letters to be found between two others, 8 to 16 in question: games in 108 ranges to train on, in 27 others to test on.

    The demonstrations guess at random among what is still possible, in as many turns as it takes.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    ranges = [letters[low : low + size] for size in range(8, 17) for low in range(len(letters) - size + 1)]
    random.Random("which ranges are held out").shuffle(ranges)
    games = [(possible, letter) for possible in (ranges[27:] if split == "train" else ranges[:27]) for letter in possible]
    random.Random(seed).shuffle(games)
    return [
        {"prompt": f"{possible[0]}-{possible[-1]}?", "answer": letter, "completion": guesses(possible, letter)}
        for possible, letter in games
    ]


def guesses(possible: str, letter: str) -> list[dict]:
    """A game of guess_letter, as the policy's and the environment's messages."""
    chance, messages, guess = random.Random(f"{possible} {letter}"), [], ""
    while guess != letter:
        guess = chance.choice(possible)
        messages.append({"role": "assistant", "content": f"<answer>{guess}</answer>"})
        if guess != letter:
            messages.append({"role": "user", "content": "up" if letter > guess else "down"})
        possible = "".join(other for other in possible if (other > guess) == (letter > guess) and other != guess)
    return messages


PROBLEMS = {"arithmetic": arithmetic, "countdown": countdown, "guess_letter": guess_letter}
