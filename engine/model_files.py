"""
The files of a model: a folder, or a repository on the Hugging Face hub. What a library raises is one line.
"""

import json
from contextlib import contextmanager
from pathlib import Path

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from engine.errors import in_one_line

@contextmanager
def loading_errors(path: str):
    """Raise ValueError, one line with the path, for whatever a library raises. Our messages begin with --."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, ValueError) and str(error).startswith("--")
        problem = "cannot be loaded" if Path(path).is_dir() else "no such folder; from the hub"
        line = str(error) if known else f"--model_path={path}: {problem}: {in_one_line(error)}"
        raise ValueError(line) from error


def auto_class(config):
    """Return the class of transformers that loads a configuration's model. Mistral 3 has none for text."""
    kind = type(config)
    with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def adapter_settings(path: str) -> dict:
    """Return adapter_config.json of a folder that holds an adapter; {} for any other."""
    file = Path(path) / "adapter_config.json"
    if not path or not file.exists():
        return {}
    return json.loads(file.read_text())
