"""
Reward functions for forms of answers: multiple choice, patterns, JSON, XML; and the sum of an environment's points.
"""

import importlib.util
import json
import re

from reward_functions.answers import extract_answer, payload, same_answer, text_of


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


def environment(completions, turn_points=None, **columns) -> list[float]:
    """What the environment gave for the turns of a conversation, added up; 0 where there was none.

    environment([conversation], turn_points=[[-0.1, -0.1, 1.0]]) == [0.8]
    """
    return [0.0] * len(completions) if turn_points is None else [float(sum(points)) for points in turn_points]
