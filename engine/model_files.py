"""
The files of a model: a folder, or a repository on the Hugging Face hub. Mistakes are found before anything is
loaded, and are reported in one line.
"""

import json
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from engine.errors import in_one_line

TOKENIZER = "tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"


def check_model_path(path: str) -> None:
    """Raise ValueError, one line, if a path is not the folder or the hub id of a model, or of its adapter.

    The hub is asked once, where transformers would try again for half a minute if there is no network.
    """
    base = adapter_settings(path).get("base_model_name_or_path", path)
    if Path(path).is_dir() and not any(Path(path, name).exists() for name in TOKENIZER):
        raise ValueError(f"--model_path={path}: it has no {' or '.join(TOKENIZER)}")
    with loading_errors(path, f"no such folder as {base}; from the hub"), suppress(EntryNotFoundError):
        if not Path(base).is_dir() and not isinstance(try_to_load_from_cache(base, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(base, "config.json"))      # EntryNotFoundError: an adapter


@contextmanager
def loading_errors(path: str, problem: str):
    """Raise ValueError, one line with the path, for whatever a library raises. Our messages begin with --."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, ValueError) and str(error).startswith("--")
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
