"""
The memory of a run that is not started, and flags with which it fits: python train.py --estimate.
"""

from collections.abc import Iterator
from dataclasses import replace

from config import Config
from engine.devices import available_gb, best_device, peak_memory_gb
from engine.precision import resolve_precision
from runs.memory_estimate import FULL, describe_step, memory_gb, resolve_memory_settings
from runs.setup import parse_mesh


def print_estimate(config: Config) -> None:
    """Print the memory of a run by the configuration of its model alone, and flags with which it fits.

    raises  ValueError in one line if there is no configuration, or if flags exclude each other
    """
    longest, device = config.data.max_prompt_length, best_device()
    memory = config.training.memory_gb or available_gb(device)
    kind = "cuda" if config.training.memory_gb else device.type
    shared = config.grpo.engine != "plain"
    libraries = peak_memory_gb(device) if kind == "cpu" else 0.0
    # auto: an accelerator of which only the memory is known is taken to have bfloat16.
    auto = "bfloat16" if config.training.memory_gb else resolve_precision("auto", device)
    text = f"estimate from the model's configuration, prompts of {longest} tokens; not confirmed on a GPU"
    print(text, flush=True)
    fitting: list = []                                    # items of flags with which it fits
    for number, flags in enumerate(candidates(config, auto, kind)):
        if any(shown <= flags.items() for shown in fitting):
            continue
        try:
            changed = Config.of(**config.given_flags | flags)
            if changed.model.precision == "auto":
                changed = replace(changed, model=replace(changed.model, precision=auto))
            mesh = parse_mesh(changed)
            chosen = resolve_memory_settings(changed, kind, longest, mesh, memory)
            total = memory_gb(chosen, longest, mesh, shared)["in all"] + libraries
        except ValueError:
            if not number:
                raise
            continue                                      # flags that exclude each other
        fits, named = total <= FULL * memory, flags | {
            "max_tokens_per_forward": chosen.training.max_tokens_per_forward,
            "gradient_checkpointing": chosen.training.gradient_checkpointing}
        words = " ".join(f"--{name} {str(value).lower()}" for name, value in named.items())
        if not number:
            lines = describe_step(
                chosen, longest_prompt=longest, shared_prompt=shared, mesh=mesh, memory=memory,
                libraries=libraries)
            processes = " ".join(f"{name}={size}" for name, size in mesh.items() if size > 1) or "one"
            verdict = "fits" if fits else "does not fit, tried"
            print(*lines, f"{verdict}: {words}, processes: {processes}", sep="\n")
        elif fits:
            print(f"would fit, about {total:.3g} GB: {words}")
            fitting.append(flags.items())
        if fits and "lora_rank" not in flags:             # LoRA is another method: name processes as well
            return


def candidates(config: Config, auto: str, device: str) -> Iterator[dict]:
    """Yield flags that save memory, those first that change least; without flags that were given.

    auto  the precision that is used if none was given;  device  its type, as in torch
    """
    half = {} if auto == "bfloat16" else {"precision": "bfloat16"}
    small = {"generation_batch_size": config.grpo.num_completions_per_prompt}
    offload = {"reference_offload": True} if config.grpo.kl_coef and device != "cpu" else {}
    several = [half | {"mesh": f"fsdp={2**n}"} for n in range(1, 8)]
    given = config.given_flags.keys()
    for flags in {}, half, half | offload, half | {"adam_8bit": True}, half | {"lora_rank": 16}, *several:
        if not given & {"mesh", "lora_rank", "adam_8bit"} & set(flags):
            for more in flags, flags | small:
                yield {name: value for name, value in more.items() if name not in given}
