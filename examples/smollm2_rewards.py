"""
The reward function of a form that SmolLM2-135M-Instruct is trained to fill in (docs/results.md).

    python train.py examples/smollm2_form.json
"""

import json


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
