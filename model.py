"""
Load and save the policy's model, a causal language model of transformers or the built-in tiny Gemma; and the
value head. This file supports one process, with all weights in float32 and trained.

engine/models.py adds hubs, LoRA adapters, 16 bits and several processes.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file

from rewards import TAGS

# Texts on which tokenizers of different classes differ: spaces, digits, case, lines, other scripts.
SAMPLES = (
    "1+1=?", " It's 12345 x 29\u00d730;\n\n\tdef f(a_b):  # na\u00efve \u6f22\u5b57 \U0001f600", '["Hi"] ALL')


def load_tokenizer(model_config) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a ModelConfig, or the built-in one. EOS replaces a missing pad token."""
    if not model_config.model_path:
        return byte_tokenizer()
    variables = json.loads(model_config.chat_template_kwargs or "null")
    options = {} if variables is None else {"chat_template_kwargs": variables}   # saved with the tokenizer
    options["trust_remote_code"] = model_config.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(model_config.model_path, **options)
    if not equals_file(tokenizer, model_config.model_path):          # of a class with other steps
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_config.model_path, **options)
        if not equals_file(tokenizer, model_config.model_path):
            raise ValueError(
                f"--model_path={model_config.model_path}: transformers makes other token ids than its "
                "tokenizer.json; correct tokenizer_class in tokenizer_config.json")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):          # a folder without tokenizer files
        raise ValueError(f"--model_path={model_config.model_path}: no tokenizer is there")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model_path={model_config.model_path}: its tokenizer needs an eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token         # harmless: masks come from lengths, not from ids
    if model_config.chat_template == "none":
        tokenizer.chat_template = None
    if unknown := [name for name in variables or () if name not in str(tokenizer.chat_template)]:
        given = model_config.chat_template_kwargs
        problem = f"has no variable {unknown[0]}" if tokenizer.chat_template else "does not exist"
        raise ValueError(f"--chat_template_kwargs={given}: the chat template {problem}")
    return tokenizer


def equals_file(tokenizer, path: str) -> bool:
    """Return True if a tokenizer makes the ids of its tokenizer.json, or has no such file."""
    file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if not file:
        return True
    own = Tokenizer.from_file(file)
    own.no_truncation()
    own.no_padding()
    ids = [own.encode(text, add_special_tokens=False).ids for text in SAMPLES]
    return ids == tokenizer(list(SAMPLES), add_special_tokens=False).input_ids


def load_policy(model_config) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the model and the tokenizer of the folder model_config.model_path, or the built-in ones.

    The model is in evaluation mode and stays so: with dropout, ratios would not be 1 before the first update.

    model_config  a ModelConfig
    raises  ValueError with one line for settings that need load_any_policy of engine/models.py
    """
    require_plain_settings(model_config)
    tokenizer = load_tokenizer(model_config)
    if not model_config.model_path:
        return tiny_gemma(tokenizer, model_config), tokenizer
    model, missing = load_weights(model_config, model_config.model_path)         # in evaluation mode already
    require_weights(model, missing, model_config.model_path)
    return model, tokenizer


def require_plain_settings(model_config) -> None:
    """Raise ValueError for settings that need engine/models.py: all but a folder of float32 weights."""
    path = model_config.model_path
    refused = {
        "model_path": path and (not Path(path).is_dir() or (Path(path) / "adapter_config.json").exists()),
        "lora_rank": model_config.lora_rank, "precision": model_config.precision not in ("auto", "float32"),
    }
    if names := [name for name in refused if refused[name]]:
        raise ValueError(
            f"--{names[0]}={getattr(model_config, names[0])}: only folders of float32 weights are supported "
            "here; for hubs, LoRA and 16 bits use load_any_policy of engine/models.py")


def load_weights(model_config, path: str, cls=AutoModelForCausalLM) -> tuple[PreTrainedModel, set[str]]:
    """Load a model in float32 from a path. Return it, and the names of weights that are in no file.

    If the files have a separate head although the config ties it to the embedding, transformers loads that
    head. Then tie_word_embeddings is set to False, or the head would be lost when weights are tied again.
    """
    chosen = model_config.attn_implementation
    model, found = cls.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=model_config.trust_remote_code,
        attn_implementation=None if chosen == "auto" else chosen,
        output_loading_info=True)
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        for each in model.config, model.config.get_text_config():
            each.tie_word_embeddings = False
    return model, set(found["missing_keys"])


def require_weights(model: PreTrainedModel, missing: set[str], path: str) -> None:
    """Raise ValueError if trained weights are in no file: transformers would initialise them at random."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if lacking := sorted(trained & missing):
        raise ValueError(
            f"--model_path={path}: its files lack {len(lacking)} weights of the model, such as {lacking[0]}; "
            "copy or download all of them")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for any text: one token per byte of UTF-8 and per tag of TAGS, and pad, EOS, BOS."""
    special = ["<pad>", "<eos>", "<bos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
        padding_side="left", clean_up_tokenization_spaces=False)
    fast.add_tokens(list(TAGS))                           # ordinary tokens, so that decoding shows them
    return fast


def tiny_gemma(tokenizer, model_config) -> Gemma3ForCausalLM:
    """Return a Gemma 3 of a million parameters with random weights; every second layer has a window of 64."""
    chosen = model_config.attn_implementation
    return Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32,
        sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        initializer_range=128**-0.5,                      # with 0.02 training takes twice as many steps
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        attn_implementation=None if chosen == "auto" else chosen,
    )).eval()


class ValueHead(torch.nn.Module):
    """Predict the expected reward before each token from the hidden state that predicts it: (N, H) -> (N,).

    The output is 0 at first. No dropout: values before and during updates must come from the same function.

    seed    seed of the hidden layer's weights, which are the same on all ranks
    """

    def __init__(self, hidden_size: int, seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.layers = torch.nn.Sequential(
                torch.nn.LayerNorm(hidden_size), torch.nn.Linear(hidden_size, hidden_size), torch.nn.ReLU(),
                torch.nn.Linear(hidden_size, 1),
            )
        torch.nn.init.zeros_(self.layers[-1].weight)
        torch.nn.init.zeros_(self.layers[-1].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden.to(self.layers[-1].weight.dtype))[:, 0]


def save_policy(model: PreTrainedModel, tokenizer, folder: Path, weights: dict | None = None) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load. weights: replace the model's."""
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    follow_umask(folder)


def follow_umask(folder: Path) -> None:
    """Give weights, which safetensors writes for their owner alone, the mode of other files of the folder."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "tokenizer_config.json").stat().st_mode & 0o777)
