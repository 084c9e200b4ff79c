"""
The reference of the KL term: a copy of the policy, the model of --reference_path, a model that is passed to
train(), or the reference in a checkpoint.
"""

from dataclasses import replace
from pathlib import Path

import torch

from config import Config, GRPOConfig, ModelConfig
from engine.models import load_any_policy, load_any_tokenizer
from engine.network import Network, copy_into, move
from engine.sharding import shard, sharded_like
from policy import Policy


def config_of_reference(config: Config) -> ModelConfig:
    """Return settings that load the model of --reference_path: in the policy's precision, without LoRA."""
    return replace(
        config.model, model_path=config.grpo.reference_path, lora_rank=0, chat_template_kwargs="")


def compare_tokenizers(tokenizer, config: Config) -> None:
    """Raise ValueError if a token of the policy has another id in the model of --reference_path."""
    try:
        theirs = load_any_tokenizer(config_of_reference(config)).get_vocab()
    except ValueError as error:
        raise ValueError(str(error).replace("--model_path", "--reference_path")) from None
    ours = tokenizer.get_vocab()
    if differs := [token for token, number in ours.items() if theirs.get(token) != number]:
        example = f"{differs[0]!r} is {ours[differs[0]]} here and {theirs.get(differs[0])} there"
        raise ValueError(
            f"--reference_path={config.grpo.reference_path}: {len(differs)} of {len(ours)} tokens differ "
            f"there ({example}); use a model with the policy's tokenizer")


def load_teacher(config: Config, network: Network) -> torch.nn.Module:
    """Load the model of --reference_path, frozen, on the device of the policy and sharded like it.

    Models with the same tokenizer may pad their heads to different sizes, such as Qwen 2.5 to 151,936 and
    152,064 rows. Rows beyond those of the policy belong to no token and are dropped.
    """
    teacher, _ = load_any_policy(config_of_reference(config), trainable=False)
    rows = len(network.module.get_output_embeddings().weight)
    for module in teacher.get_output_embeddings(), teacher.get_input_embeddings():
        if len(module.weight) > rows:                     # resize_token_embeddings cannot cut a DTensor
            module.weight = torch.nn.Parameter(module.weight.detach()[:rows], requires_grad=False)
            module.padding_idx = None                     # of an embedding: one of these rows
    move(teacher, network.module.device)                  # also ties weights again
    shard(teacher, network.mesh)
    return teacher


def prepare_teacher(
    reference: torch.nn.Module | None, network: Network, tokenizer, config: Config
) -> torch.nn.Module:
    """Return the given teacher or that of --reference_path, frozen. Raises ValueError if it does not fit."""
    if reference is None:
        reference = load_teacher(config, network)
    sizes = [len(model.get_output_embeddings().weight) for model in (reference, network.module)]
    if sizes[0] < len(tokenizer):
        raise ValueError(
            f"reference: it has {sizes[0]} tokens, the tokenizer {len(tokenizer)}; use a model with the "
            "same tokenizer")
    if config.grpo.exact_kl and sizes[0] != sizes[1]:
        raise ValueError(
            f"reference: its head has {sizes[0]} rows, that of the policy {sizes[1]}, and the exact KL sums "
            f"over both; use --kl_estimator ratio_k3, or resize_token_embeddings({min(sizes)})")
    return reference.eval().requires_grad_(False)


def first_reference(policy: Policy, grpo_config: GRPOConfig, teacher: torch.nn.Module | None) -> Policy:
    """Return the reference at the start of GRPO: the teacher, else a copy of the policy."""
    exact = grpo_config.reference_mode == "ema"
    reference = policy.frozen_copy(exact=exact) if teacher is None else policy.like(teacher)
    if reference.model is not policy.model:               # an adapter is a reference within that model
        move(reference.model, home_of_reference(grpo_config, policy.device))
    return reference


def home_of_reference(grpo_config: GRPOConfig, device: torch.device) -> torch.device:
    """Return the device on which a reference waits until it is used."""
    return torch.device("cpu") if grpo_config.reference_offload else device


def load_reference(network: Network, config: Config, checkpoint: Path, state: dict):
    """Return the Network or the module of a checkpoint's reference, None without one. state: of state.pt."""
    if adapter := state.get("reference_adapter"):
        reference = network.frozen_copy()
        pairs = zip(adapter, reference.adapter, strict=True)
        copy_into(reference.adapter, [sharded_like(new, old) for new, old in pairs])
        return reference
    if not (checkpoint / "reference").exists():
        return None
    reference, _ = load_any_policy(
        replace(config.model, model_path=str(checkpoint / "reference")),
        trainable=config.grpo.reference_mode == "ema",    # in float32, see Network.frozen_copy
    )
    reference = move(reference, home_of_reference(config.grpo, network.module.device)).eval()
    shard(reference, network.mesh)
    return reference.requires_grad_(False)
