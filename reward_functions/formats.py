"""Reward functions for answer formats (multiple choice, patterns, JSON, XML) and for environments."""

import json
import re
import string

from reward_functions.answers import as_texts, extract_block, final_answer, unwrap
from rewards import extract_answer, is_missing, same_answer, score_each, text_of

LETTERS = string.ascii_uppercase # of choices
NAMED = re.compile(r"(?i:(the )?((correct|right|final) )?(option|choice|answer)( is)?:? )?"      # "Option B",
                   r"[([]?([A-Za-z])([]).:]|\s+[-\u2013\u2014]\s+\w\w|$)")                       # "B - four"


def multiple_choice(completions, answer, choices=None, **columns) -> list[float | None]:
    """Return 1 if the answer, tagged or boxed as for math_equality, names the right choice, else 0; None if
    the column `answer` names no choice.

    "B", "(b)", "**B**", "B) four", "B - four" and "Option B" name choice B; so does its text if the column
    `choices` is a list of texts. Texts take precedence over letters.

    multiple_choice(["<answer>(b)</answer>"], answer=["B"]) == [1.0]
    {"prompt": "2+2? A) 3 B) 4", "answer": "B", "choices": ["3", "4"]}
    """

    def reward(text: str, truth, options: list[str]) -> float | None:
        given, right = final_answer(text), choice_of(truth, options)
        return None if right is None else float(given is not None and choice_of(given, options) == right)

    return score_each(reward, completions, answer, map(as_texts, choices or [None] * len(completions)))


def choice_of(answer, options: list[str]) -> str | None:
    """Return the choice that an answer names by its text, else by its letter."""
    name, choices = str(answer).strip(), options or list(LETTERS)
    letter = NAMED.match(re.sub(r"\*\*|`", "", unwrap(name)))
    index = LETTERS.find(letter[6].upper()) if letter else -1                 # -1: an empty slice below
    equal = [c for c in choices if c == name] or [c for c in choices if same_answer(unwrap(name), unwrap(c))]
    return [*equal, *choices[index : index + 1], None][0]


def answer_pattern(completions, pattern, **columns) -> list[float | None]:
    """Return 1 if the whole tagged answer matches the regular expression in the column `pattern`, else 0;
    None where there is no pattern.

    answer_pattern(["<answer>2024-02-30</answer>"], pattern=[r"\\d{4}-\\d\\d-\\d\\d"]) == [1.0]
    {"prompt": "On which day did it begin?", "pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}
    """
    def reward(text: str, rule: str) -> float:
        answer = extract_answer(text)
        return float(bool(answer) and re.fullmatch(rule, answer, re.DOTALL) is not None)

    return score_each(reward, completions, pattern)


def json_format(completions, schema=None, **columns) -> list[float]:
    """Return 1 if the completion is JSON, and valid under the JSON Schema in the column `schema` (an object
    or its text), if there is one, according to the package jsonschema; else 0.

    The JSON is read from the last fenced block, else from the tagged answer, else from the whole text.

    json_format(['{"x": 1}', "{x: 1}"], schema=[{"required": ["x"]}, None]) == [1.0, 0.0]
    {"prompt": "Where is the mouse? Answer in JSON.", "schema": {"required": ["x", "y"]}}
    """

    def reward(text: str, schema) -> float:
        try:
            value = json.loads(extract_block(text, "json"), parse_constant=int)       # rejects NaN, Infinity
            schema = json.loads(schema) if isinstance(schema, str) and schema.strip() else schema
            if is_missing(schema):
                return 1.0
            import jsonschema

            return float(jsonschema.validators.validator_for(schema)(schema).is_valid(value))
        except (ValueError, RecursionError, OverflowError):     # multipleOf of 1e999 overflows
            return 0.0

    return list(map(reward, map(text_of, completions), schema or [None] * len(completions)))


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
    """Return 0 for each: the only loss is then the KL to a reference (docs/recipes.md, A teacher).

    none(["a", "b"]) == [0.0, 0.0]
    """
    return [0.0] * len(completions)
