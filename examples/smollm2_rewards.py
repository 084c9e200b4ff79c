"""
Reward functions of the three tasks on which SmolLM2-135M-Instruct is trained (docs/results.md).

    python train.py examples/smollm2.json                 addition: last_number
    python train.py examples/smollm2_form.json            a form: person_as_json
    python train.py examples/smollm2_problems.json        word problems: last_number
"""

import json
import re


def last_number(completions, answer, **columns):
    """Return 1 if the last number of a completion is the answer, else 0."""
    numbers = [re.findall(r"\d+", completion) for completion in completions]
    return [float(found[-1:] == [str(truth)]) for found, truth in zip(numbers, answer, strict=True)]


def person_as_json(completions, name, age, **columns):
    """Return 1 if a completion is nothing but JSON with this name and this age (31.0 equals 31), else 0."""
    return [float(parse(text) == {"name": who, "age": int(years)})
            for text, who, years in zip(completions, name, age, strict=True)]


def parse(text):
    """Return the value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):                   # not JSON, or a thousand brackets
        return None
