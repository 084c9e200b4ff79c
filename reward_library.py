"""
The reward functions that come with this project: text in, points out. Any of them can be copied out or called by hand.

Each takes lists with one entry per completion and gives a list of points; rewards.py says what else there is to the signature.
A model may print anything, so the functions here answer 0 and never raise, and two unreadable answers are not equal answers.
None means "could not score": the data says nothing to compare with.

The expected form is <reasoning>...</reasoning><answer>...</answer>. Functions that look at the answer take what is tagged.
What runs programs is in reward_programs.py, what asks models in reward_models.py. docs/rewards.md shows what each function
gives to right, wrong, empty and cheating completions.
"""

import ast
import importlib.util
import itertools
import json
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
FORM = re.compile(r"<reasoning>(.*?)</reasoning>\s*<answer>(.*?)</answer>", re.DOTALL)


def text_of(completion) -> str:
    """The text of a completion: a string, or the content of the last chat message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(text: str) -> str | None:
    """What stands between <answer> and </answer>; None unless there is exactly one such pair, and something in it.

    Several answers are no answer: otherwise listing all candidates would pay.
    """
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    return text.partition("<answer>")[2].partition("</answer>")[0].strip() or None


def as_number(text: str) -> Decimal | None:
    """'1,234', '$72', '72.0', '5 %' as an exact number; None for anything else, NaN and infinity included."""
    cleaned = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().lstrip("$€£").rstrip("%. "))
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_answer(given: str | None, truth: str | None) -> bool:
    """Equal as numbers, or as text without regard to case and surrounding space."""
    if given is None or truth is None:
        return False
    given_number, true_number = as_number(given), as_number(truth)
    if given_number is not None and true_number is not None:
        return given_number == true_number
    return given.strip().casefold() == truth.strip().casefold()


def payload(text: str, language: str) -> str:
    """What a completion hands in: the last fenced block of a language, in the tagged answer if there is one, else in all of
    the text; without a block, all of that.

    payload("So:\\n```python\\nx = 1\\n```", "python") == "x = 1\\n"
    """
    text = extract_answer(text) or text
    return (re.findall(rf"```(?:{language})?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE) or [text])[-1]


# ---- what was asked for --------------------------------------------------------------------------------------------


def correctness(completions, answer, **columns) -> list[float | None]:
    """1 point if the one tagged answer equals the column `answer`, else 0; None where the data set has no answer.

    correctness(["<answer>72.0</answer>"], answer=["72"]) == [1.0]
    """
    return [
        None if truth is None else float(same_answer(extract_answer(text_of(completion)), str(truth)))
        for completion, truth in zip(completions, answer, strict=True)
    ]


def reasoning_coherence(completions, **columns) -> list[float]:
    """Structure, 0 to 1 point: a fifth each for one pair of reasoning tags, one pair of answer tags, reasoning directly
    before answer, something written in both, and nothing outside of them.

    reasoning_coherence(["<reasoning>1+1=2</reasoning><answer>2</answer>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        form = FORM.search(text)
        checks = (
            text.count("<reasoning>") == text.count("</reasoning>") == 1,
            text.count("<answer>") == text.count("</answer>") == 1,
            form is not None,
            form is not None and bool(form[1].strip()) and bool(form[2].strip()),
            form is not None and form[0] == text.strip(),
        )
        points.append(sum(checks) / len(checks))
    return points


def explanation_quality(completions, **columns) -> list[float]:
    """Conciseness, 0 to 1 point: 1 for tagged reasoning of up to 100 words, falling to 0 at 300, times the share of its
    lines that are not repeats. 0 without any reasoning: silence is not concise.

    explanation_quality(["<reasoning>2 and 2 make 4</reasoning>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        reasoning = text.partition("<reasoning>")[2].partition("</reasoning>")[0].strip() if "</reasoning>" in text else ""
        lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
        brevity = min(1.0, max(0.0, (300 - len(reasoning.split())) / 200))
        points.append(brevity * len(set(lines)) / len(lines) if lines else 0.0)
    return points


# ---- other forms of answers ----------------------------------------------------------------------------------------


def multiple_choice(completions, answer, choices=None, **columns) -> list[float | None]:
    """1 point if the tagged answer names the right choice, else 0; None where the column `answer` names no choice.

    "B", "(b)", "B." and "B) four" name choice B. With the column `choices` (a list of texts) the data's answer may also be a
    number that counts them from 0, or such a text, and a completion may give the text.

    multiple_choice(["<answer>(b)</answer>"], answer=["B"]) == [1.0]
    """

    def points(text: str, truth: str, texts: list[str]) -> float | None:
        right = next((i for i, text in enumerate(texts) if truth in (str(i), text)), "ABCDEFGHIJ".find(truth.upper() or "?"))
        if right < 0:
            return None
        given = extract_answer(text) or ""
        if right < len(texts) and same_answer(given, texts[right]):
            return 1.0
        named = re.fullmatch(r"\(?([A-Z])(?:[).:]+.*)?", given, re.DOTALL | re.IGNORECASE)
        return float(named is not None and "ABCDEFGHIJ".find(named[1].upper()) == right)

    choices = choices or [None] * len(completions)
    return [
        None if truth is None else points(text_of(completion), str(truth).strip(), texts or [])
        for completion, truth, texts in zip(completions, answer, choices, strict=True)
    ]


def answer_pattern(completions, pattern, **columns) -> list[float | None]:
    """1 point if all of the tagged answer matches the regular expression in the column `pattern`, else 0; None without.

    answer_pattern(["<answer>2024-02-30</answer>"], pattern=[r"\\d{4}-\\d\\d-\\d\\d"]) == [1.0]
    """
    answers = [extract_answer(text_of(completion)) or "" for completion in completions]
    return [
        None if wanted is None else float(re.fullmatch(wanted, answer, re.DOTALL) is not None)
        for answer, wanted in zip(answers, pattern, strict=True)
    ]


def json_format(completions, schema=None, **columns) -> list[float]:
    """1 point if what is handed in is JSON, and follows the JSON Schema in the column `schema` (an object, or its text)
    where there is one; else 0. Without the package jsonschema only the schema's `required` keys are looked for.

    What is handed in: a fenced block, or the tagged answer, or everything.

    json_format(['<answer>{"x": 1}</answer>', "{x: 1}"], schema=[{"required": ["x"]}, None]) == [1.0, 0.0]
    """

    def points(text: str, schema) -> float:
        try:
            value = json.loads(payload(text, "json"), parse_constant=int)            # which refuses NaN and Infinity
            return float(schema is None or follows(value, json.loads(schema) if isinstance(schema, str) else schema))
        except (ValueError, RecursionError):
            return 0.0

    return [points(text_of(c), s) for c, s in zip(completions, schema or [None] * len(completions), strict=True)]


def follows(value, schema: dict) -> bool:
    """Whether a value follows a JSON Schema, as far as we can tell."""
    if importlib.util.find_spec("jsonschema"):
        import jsonschema

        return jsonschema.validators.validator_for(schema)(schema).is_valid(value)
    required = schema.get("required", [])
    return not required or (isinstance(value, dict) and all(key in value for key in required))


def xml_tags(completions, tags=None, **columns) -> list[float]:
    """0 to 1 point: the share of the tags in the column `tags` (names; reasoning and answer where there is none) that occur
    as one pair with something in it, behind the pair before.

    xml_tags(["<plan>x</plan><code></code>"], tags=[["plan", "code"]]) == [0.5]
    """

    def points(text: str, names: list[str]) -> float:
        found, behind = 0, 0
        for name in names:
            start, end = text.find(f"<{name}>", behind), text.find(f"</{name}>", behind)
            single = text.count(f"<{name}>") == text.count(f"</{name}>") == 1
            if single and 0 <= start < end and text[start + len(name) + 2 : end].strip():
                found, behind = found + 1, end
        return found / len(names)

    tags = [names or ["reasoning", "answer"] for names in tags or [None] * len(completions)]
    return [points(text_of(completion), names) for completion, names in zip(completions, tags, strict=True)]


def countdown(completions, numbers, target, **columns) -> list[float | None]:
    """1 point if the one tagged answer is made of the numbers, each used exactly once, with + - * / and parentheses, and
    equals the target, else 0; None where the data set has no numbers or no target. Computed exactly, in fractions.

    countdown(["<answer>(3*4)+7</answer>"], numbers=[[7, 3, 4]], target=[19]) == [1.0]
    """

    def points(text: str, allowed: list[int], wanted: int) -> float:
        value, used = evaluate_expression(extract_answer(text) or "")
        return float(value == int(wanted) and sorted(used) == sorted(map(int, allowed)))

    return [
        None if allowed is None or wanted is None else points(text_of(completion), allowed, wanted)
        for completion, allowed, wanted in zip(completions, numbers, target, strict=True)
    ]


def evaluate_expression(text: str) -> tuple[Fraction | None, list[int]]:
    """The value of an expression like (3*4)+7 and the numbers in it; None for the value if it is anything else.

    Nothing is run: the text is parsed, and only whole numbers, + - * / between two of them, and parentheses count. There are
    no powers, so no value is large; 200 characters are enough for any problem, and cannot nest too deep for the parser.
    """
    used: list[int] = []

    def value(node) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Constant):
            raise ValueError("not an expression of numbers")
        used.append(node.value)
        return Fraction(node.value)

    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):   # so no names, no fractions of a number, no warnings from the parser
        return None, used
    try:
        return value(ast.parse(text.strip(), mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None, used


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def environment(completions, turn_points=None, **columns) -> list[float]:
    """What the environment gave for the turns of a conversation, added up; 0 where there was none.

    environment([conversation], turn_points=[[-0.1, -0.1, 1.0]]) == [0.8]
    """
    return [0.0] * len(completions) if turn_points is None else [float(sum(points)) for points in turn_points]


# ---- what a text is like: heuristics, each of which a policy can please without being any good ------------------------
# Give them a small weight beside a function that knows what is right, and look at completions.


def repetition_penalty(completions, **columns) -> list[float]:
    """-1 to 0 points: minus the share of runs of four words that stood in the text before. A heuristic: synonyms slip through.

    repetition_penalty(["a b c d e", "a b a b a b"]) == [0.0, -1 / 3]
    """
    points = []
    for text in map(text_of, completions):
        words = text.casefold().split()
        runs = list(zip(*(words[i:] for i in range(4)), strict=False))
        points.append(len(set(runs)) / len(runs) - 1 if runs else 0.0)
    return points


def diversity(completions, prompts=None, **columns) -> list[float | None]:
    """0 to 1 point: 1 minus what a completion has in common with a sibling, on average: word pairs in both / in either.
    Siblings answer the same prompt. None for a completion without any. A heuristic: noise is as diverse as can be.

    diversity(["a b", "a b", "c d"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    """
    words = [text_of(completion).casefold().split() for completion in completions]
    pairs = [set(itertools.pairwise(text)) or set(text) for text in words]
    groups = defaultdict(list)
    for row, prompt in enumerate(prompts or [""] * len(completions)):
        groups[str(prompt)].append(row)
    points: list[float | None] = [None] * len(completions)
    for rows in groups.values():
        for row in rows if len(rows) > 1 else []:
            shared = [overlap(pairs[row], pairs[sibling]) for sibling in rows if sibling != row]
            points[row] = 1 - sum(shared) / len(shared)
    return points


def overlap(left: set, right: set) -> float:
    """Jaccard's index: elements in both / in either, 0 to 1. Two empty sets are the same."""
    return len(left & right) / len(left | right) if left | right else 1.0


def safety(completions, forbidden, **columns) -> list[float | None]:
    """1 point if none of the regular expressions in the column `forbidden` is found, in any case, else 0; None without a
    list. A heuristic: a list of words knows neither context nor spelling, and an empty completion is perfectly safe.

    safety(["rm -rf /", "ls"], forbidden=[[r"rm\\s+-rf"]] * 2) == [0.0, 1.0]
    """
    return [
        None if rules is None else float(not any(re.search(rule, text_of(completion), re.IGNORECASE) for rule in rules))
        for completion, rules in zip(completions, forbidden, strict=True)
    ]


def rule_list(name: str, rules: dict[str, float]) -> Callable:
    """A reward function of that name out of regular expressions, for a file of your own: the sum of the points of those that
    are found, in any case. A heuristic, as good as the list.

    polite = rule_list("polite", {r"\\bplease\\b": 0.5, r"\\bstupid\\b": -1.0});  polite(["Stupid, please"]) == [-0.5]
    """
    compiled = [(re.compile(rule, re.IGNORECASE), float(points)) for rule, points in rules.items()]

    def function(completions, **columns) -> list[float]:
        return [sum((p for rule, p in compiled if rule.search(text_of(c))), 0.0) for c in completions]

    function.__name__ = name
    return function


# ---- the four rewards of tunix's GSM8K example, for comparison -----------------------------------------------------
# Kept to the letter, with what is questionable about them: 5 of the 9.5 points are for form, a wrong number scores
# below silence, being near counts, and check_numbers reads neither a minus sign nor "1,234".

TUNIX_FORM = re.compile(r"<reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$)", re.MULTILINE | re.DOTALL)


def match_format_exactly(completions, **columns) -> list[float]:
    """3 points if reasoning and answer tags occur in order anywhere, the last one optional at a line's end; else 0."""
    return [3.0 if TUNIX_FORM.search(text_of(completion)) else 0.0 for completion in completions]


def match_format_approximately(completions, **columns) -> list[float]:
    """-2 to 2 points: half a point for each of the four tags that occurs exactly once, minus half for each that does not."""
    return [sum(0.5 if text_of(c).count(tag) == 1 else -0.5 for tag in TAGS) for c in completions]


def check_answer(completions, answer, **columns) -> list[float | None]:
    """-1 to 3 points: 3 equal, 0.5 within 10 %, 0.25 within 20 %, -0.5 not a number, -1 another number, 0 no answer."""

    def points(text: str, truth: str) -> float:
        form = TUNIX_FORM.search(text)
        if form is None:
            return 0.0
        guess, truth = form[1].strip().replace(",", ""), truth.strip().replace(",", "")
        if guess == truth:
            return 3.0
        guess_number, true_number = read_float(guess), read_float(truth)
        if guess_number is None or true_number is None:
            return -0.5
        if guess_number == true_number:
            return 3.0
        if true_number == 0:
            return -1.0
        ratio = guess_number / true_number
        return 0.5 if 0.9 <= ratio <= 1.1 else 0.25 if 0.8 <= ratio <= 1.2 else -1.0

    return [None if t is None else points(text_of(c), str(t)) for c, t in zip(completions, answer, strict=True)]


def check_numbers(completions, answer, **columns) -> list[float | None]:
    """1.5 points if the first digits and dots behind <answer> are the true number, else 0."""

    def points(text: str, truth: str) -> float:
        found = re.search(r"<answer>.*?([\d.]+)", text, re.DOTALL)
        guess, truth = read_float(found[1]) if found else None, read_float(truth.replace(",", ""))
        return 1.5 if guess is not None and guess == truth else 0.0

    return [None if t is None else points(text_of(c), str(t)) for c, t in zip(completions, answer, strict=True)]


def read_float(text: str) -> float | None:
    """A finite float, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


LIBRARY = (
    correctness, reasoning_coherence, explanation_quality, multiple_choice, answer_pattern, json_format, xml_tags, countdown,
    environment, repetition_penalty, diversity, safety,
    match_format_exactly, match_format_approximately, check_answer, check_numbers,
)
