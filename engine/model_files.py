"""
The files of a model: a folder, or a repository on the Hugging Face hub. Mistakes are found before anything is
loaded, and are reported in one line.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import transformers
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from engine.errors import first_line, in_one_line

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")      # gpt2, openai/gsm8k
REQUIRED = {
    "config.json": ["config.json"],
    "weights (model.safetensors)": ["*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin"],
    "a tokenizer (tokenizer.json)": [
        "tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"],
}


def check_model_path(path: str) -> None:
    """Raise ValueError, one line, if a path is not the folder or the hub id of a model that can be read."""
    problem = find_missing(path)
    if not problem and (adapter := adapter_settings(path)):
        base = adapter["base_model_name_or_path"]
        problem = find_missing(base)
        problem = problem and f"is an adapter for {base}, and that is not there: {problem}"
    elif not problem and Path(path).exists():
        for name, patterns in REQUIRED.items():
            if not any(any(Path(path).glob(pattern)) for pattern in patterns):
                problem = problem or f"the folder has no {name}; name a saved model, such as RUN/final"
    if problem:
        raise ValueError(f"--model_path={path}: {problem}")


@contextmanager
def loading_errors(path: str, problem: str):
    """Raise ValueError, one line with the path, for whatever a library raises. Our messages begin with --."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, ValueError) and str(error).startswith("--")
        line = str(error) if known else f"--model_path={path}: {problem}: {in_one_line(error)}"
        raise ValueError(line) from error


def find_missing(path: str) -> str:
    """Return why a path is neither a folder nor a readable model on the hub, and what to do; "" if it is."""
    folder = Path(path)
    if folder.is_dir():
        return ""
    if folder.is_file():
        return f"is a file; name its folder, {folder.parent}"
    if path.startswith("kaggle:"):
        name = path.removeprefix("kaggle:")
        return (
            "weights from Kaggle are not loaded directly: download them with "
            f'kagglehub.model_download("{name}"), and name the folder that it returns'
        )
    no_folder = f"no such folder ({folder.absolute()})"
    if not HUB_ID.fullmatch(path):
        return f"{no_folder}; ids on the hub look like gpt2 or owner/name"
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return ""                                         # downloaded before: loads without the hub
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json"))     # one request, where transformers retries
    except EntryNotFoundError:
        return ""                                         # transformers tells what the repository lacks
    except GatedRepoError:
        return (
            f"{no_folder}, and on the hub it is gated: log in with `hf auth login`, and accept the licence "
            f"at https://huggingface.co/{path}"
        )
    except RepositoryNotFoundError:
        return (
            f"{no_folder}, and the hub has no such model that you may read: correct the folder or the id "
            "(owner/name), or log in with `hf auth login` if the model is private"
        )
    except Exception as error:                            # of the network, of which there are many types
        answer = first_line(error).rstrip(".")
        return (
            f"{no_folder}, not downloaded before, and {constants.ENDPOINT} answers: {answer}; check the "
            "network, or name a folder"
        )
    return ""


def auto_class(config):
    """Return the class of transformers that loads a configuration's model. Mistral 3 has none for text."""
    kind = type(config)
    with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def attention_options(chosen: str, adapter: dict) -> dict[str, str]:
    """Return the argument for from_pretrained; {} leaves the choice to transformers.

    chosen   --attn_implementation. auto: what the adapter was trained with. Of a whole model transformers
             reads what remember_attention has written; else it takes sdpa if the class supports it
    adapter  result of adapter_settings
    """
    remembered = (adapter.get("auto_mapping") or {}).get("attn_implementation")
    attention = remembered if chosen == "auto" else chosen
    return {"attn_implementation": attention} if attention else {}


def eager_for_soft_caps(config) -> dict[str, str]:
    """Return the argument for eager attention where transformers before 5.21 takes sdpa without soft caps."""
    caps = getattr(config.get_text_config(), "attn_logit_softcapping", None)                     # Gemma 2
    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21)
    return {"attn_implementation": "eager"} if caps and old else {}


def remember_attention(model, options: dict[str, str]) -> None:
    """Write the attention that a model was loaded with into its configuration, which is saved with it.

    Not where transformers chose sdpa by itself: read again, it would be required of the towers as well.
    """
    if options or model.config._attn_implementation == "eager":
        model.config.attn_implementation = model.config._attn_implementation


def adapter_settings(path: str) -> dict:
    """Return adapter_config.json of a folder that holds an adapter; {} for any other."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text()) if path and file.exists() else {}
