"""Reward functions for answer formats (a last number, choices, patterns, JSON, XML) and for environments."""

import json
import re
from collections.abc import Callable
from string import ascii_uppercase as LETTERS

from reward_functions.answers import answer_text, as_texts, fenced_blocks, unwrap
from rewards import after_thoughts, extract_answer, is_missing, normalize, same_answer, score_each, text_of

LONGEST_CHOICE = 1000           # in characters: what is longer equals a choice only literally
NAMED = re.compile(r"(?i:(the )?((correct|right|final) )?(option|choice|answer)( is)?:? )?"      # "Option B",
                   r"((正确)?(答案|选项|选)[是为选]?:? *)?[([]?(?P<letter>[A-Za-z])"
                   r"([]).:]|\s+[-\u2013\u2014]\s+\w\w|$)")                                      # "B - four"
WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"             # 1,000 or 1000
NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?\$?(?:{WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")   # 5-3: no sign


def last_number(completions, answer, **columns) -> list[float | None]:
    """Return 1 if the last number of a completion equals the column `answer`, or an element of it, else 0. It
    needs no tags: "#### 72", "**72**", "so she pays $1,072 for them." Numbers in thoughts do not count.

    last_number(["#### 72", "It is 72 or 73."], answer=["72", "72"]) == [1.0, 0.0]
    {"prompt": "8 * 9 = ?", "answer": "72"}
    """
    def reward(text: str, truth) -> float:
        text = normalize(after_thoughts(text)).replace("\u2212", "-").replace("{,}", ",")
        return float(same_answer((NUMBER.findall(text) or [None])[-1], truth))

    return score_each(reward, completions, answer)


def multiple_choice(completions, answer, choices=None, **columns) -> list[float | None]:
    """Return 1 if the answer, tagged or boxed, names the right choice, else 0; None if the column `answer`
    names no choice. Without tags and boxes, stated_choice is the answer.

    "B", "(b)", "**B**", "B) four", "B - four", "Option B" and "答案:B" name choice B; so does its text if the
    column `choices` is a list of texts. Texts take precedence over letters.

    multiple_choice(["<answer>(b)</answer>", "The answer is B."], answer=["B", "B"]) == [1.0, 1.0]
    {"prompt": "2+2? A) 3 B) 4", "answer": "B", "choices": ["3", "4"]}
    """
    def reward(text: str, truth, options: list[str]) -> float | None:
        given, right = extract_answer(text) or stated_choice(text), choice_of(truth, options)
        return None if right is None else float(choice_of(given, options) == right)

    return score_each(reward, completions, answer, map(as_texts, choices or [None] * len(completions)))


def stated_choice(text: str) -> str:
    """Return the end of a text from the word "answer" in its last line, all of it if it is a single line.

    stated_choice("Rome is in Italy.\\n\\nSo the correct answer is **B**.") == "answer is **B**."
    """
    *before, last = after_thoughts(text).strip().splitlines() or [""]
    found = re.search("(?i)(answer|答案)(?!.*(answer|答案)).*", last[-LONGEST_CHOICE:])
    if "answer>" in text or (before and not found):
        return ""
    return found[0] if found else last


def choice_of(answer, options: list[str]) -> str | None:
    """Return the choice that an answer names by its text, else by its letter."""
    name, choices = str(answer).strip(), options or list(LETTERS)
    short = unwrap(name[:LONGEST_CHOICE])
    letter = NAMED.match(re.sub(r"\*\*|`", "", normalize(short)))
    index = LETTERS.find(letter["letter"].upper()) if letter else -1          # -1: an empty slice below
    equal = [c for c in choices if c == name] or [c for c in choices if same_answer(short, unwrap(c))]
    return [*equal, *choices[index : index + 1], None][0]


def answer_pattern(completions, pattern, **columns) -> list[float | None]:
    """Return 1 if the whole answer, tagged or boxed, matches the regular expression in the column `pattern`,
    else 0; None where there is no pattern.

    answer_pattern(["<answer>2024-02-30</answer>"], pattern=[r"\\d{4}-\\d\\d-\\d\\d"]) == [1.0]
    {"prompt": "On which day did it begin?", "pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}
    """
    def reward(text: str, rule: str) -> float:
        answer = extract_answer(text)
        return float(bool(answer) and re.fullmatch(rule, answer, re.DOTALL) is not None)

    return score_each(reward, completions, pattern)


def json_format(completions, schema=None, **columns) -> list[float]:
    """Return 1 if the completion is JSON, and follows the JSON Schema in the column `schema` (an object or
    its text), if there is one; else 0. The JSON is the last fenced block, else the tagged answer, else the
    text after thoughts.

    json_format(['{"x": 1}', "{x: 1}"], schema=[{"required": ["x"]}, None]) == [1.0, 0.0]
    {"prompt": "Where is the mouse? Answer in JSON.", "schema": {"required": ["x", "y"]}}
    """

    def reward(text: str, is_valid: Callable) -> float:
        try:
            code = [answer_text(text), *fenced_blocks(text, "json")][-1]
            return float(is_valid(json.loads(code, parse_constant=int)))          # rejects NaN, Infinity
        except (ValueError, RecursionError, OverflowError):     # multipleOf of 1e999 overflows
            return 0.0

    return list(map(reward, map(text_of, completions), map(validator, schema or [None] * len(completions))))


def validator(schema) -> Callable:
    """Return the function that checks a value against a schema. Raise an error if it is no schema."""
    if is_missing(schema):
        return lambda value: True
    import jsonschema

    schema = json.loads(schema) if isinstance(schema, str) else schema
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema).is_valid


def xml_tags(completions, tags=None, **columns) -> list[float]:
    """Return 0 to 1: the fraction of the tags in the column `tags` (default: reasoning, answer) that occur as
    exactly one pair, not empty and after the previous pair.

    xml_tags(["<plan>x</plan><code></code>"], tags=[["plan", "code"]]) == [0.5]
    {"prompt": "Write a program that sorts.", "tags": ["plan", "code"]}
    """

    def reward(text: str, names: list[str]) -> float:
        found, previous_end = 0, 0
        for name in names:
            start, end = text.find(f"<{name}>", previous_end), text.find(f"</{name}>", previous_end)
            single = text.count(f"<{name}>") == text.count(f"</{name}>") == 1
            if single and 0 <= start < end and text[start + len(name) + 2 : end].strip():
                found, previous_end = found + 1, end
        return found / len(names)

    tags = [as_texts(names) or ["reasoning", "answer"] for names in tags or [None] * len(completions)]
    return score_each(reward, completions, tags)


def environment(completions, turn_points=None, **columns) -> list[float]:
    """Return the sum of the environment's rewards for the turns of a conversation; 0 without environment.

    environment([conversation], turn_points=[[-0.1, -0.1, 1.0]]) == [0.8]
    """
    return [0.0] * len(completions) if turn_points is None else [float(sum(turns)) for turns in turn_points]


def none(completions, **columns) -> list[float]:
    """Return 0 for each: the only loss is then the KL to a reference (docs/recipes.md, A teacher)."""
    return [0.0] * len(completions)
