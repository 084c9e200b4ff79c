"""
LoRA adapters: add one to a model, and save it. This code calls peft directly, since transformers 5.24
requires a newer peft than has been released.
"""

import os

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from engine.fingerprints import fingerprint_of_model
from engine.text_model import linear_layers
from model import follow_umask


def add_adapter(model: PreTrainedModel, model_config, saved: bool) -> None:
    """Add a trainable adapter to the linear layers of the text model, except experts and routers.

    model_config  a ModelConfig
    saved         True: load the adapter from the folder model_path; False: create a new one
    """
    from peft import LoraConfig, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    if saved:
        lora = LoraConfig.from_pretrained(model_config.model_path)
        lora.inference_mode = False
    else:
        lora = LoraConfig(r=model_config.lora_rank, lora_alpha=model_config.lora_alpha, task_type="CAUSAL_LM",
                          target_modules=linear_layers(model))
        # For some models peft takes names such as gate_proj for those of all experts. Adapted experts need a
        # copy of their weights in every pass and during merging, so they are excluded.
        convert_peft_config_for_transformers(lora, model, None)
        lora.target_parameters, lora.rank_pattern, lora.alpha_pattern = None, {}, {}
    more = [name for name in ("modules_to_save", "trainable_token_indices") if getattr(lora, name, None)]
    base = model.name_or_path                             # a folder, or the id of a hub
    lora.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    lora.base_fingerprint = fingerprint_of_model(base)    # now, since another model may be put there later
    inject_adapter_in_model(lora, model)
    ends = {"the embedding": model.get_input_embeddings(), "the head": model.get_output_embeddings()}
    more += [name for name, module in ends.items() if hasattr(module, "lora_A")]
    if more:
        raise ValueError(
            f"--model_path={model_config.model_path}: the adapter changes {more[0]}, not only layers; merge "
            "it into its base model with peft's merge_and_unload, and load the result")
    model.eval()                                          # without the adapter's dropout
    if saved:
        set_peft_model_state_dict(model, load_peft_weights(model_config.model_path, device="cpu"))


def save_adapter(model: PreTrainedModel, tokenizer, folder, weights: dict[str, torch.Tensor]) -> None:
    """Write only the adapter to a folder, in peft's format, and the tokenizer. weights: full_state_dict."""
    from peft import get_peft_model_state_dict

    lora = model.peft_config["default"]
    lora.save_pretrained(folder)
    adapter = {f"base_model.model.{name}": x for name, x in get_peft_model_state_dict(model, weights).items()}
    save_file(adapter, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "base_fingerprint").write_text(lora.base_fingerprint)
    tokenizer.save_pretrained(folder)
    follow_umask(folder)


def adapted_weights(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the LoRA layers by the names of the weights to which they are added."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
