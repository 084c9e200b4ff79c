"""Resume a run: find its newest checkpoint, and refuse settings or data that do not continue it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from config import Config
from engine.devices import on_main
from runs.checkpoint import latest_checkpoint, read_state
from runs.folder import RunFolder
from sources.readers import SUFFIXES


def find_checkpoint(
    config: Config, functions: list[str], folder: RunFolder, fingerprints: dict[str, str]
) -> Path | None:
    """Return the checkpoint to resume from, if there is one. Raises ValueError if it does not fit.

    functions  names of those that were passed to train()
    """
    checkpoint = on_main(partial(latest_checkpoint, folder.path))
    if not checkpoint and (folder.path / "final").exists():
        raise ValueError(
            f"--resume: {folder.path} is complete and its checkpoints are gone; pass final as --model_path")
    console = folder.console
    console.print(f"resuming {folder.path} from {checkpoint or 'its beginning: there is no checkpoint yet'}")
    if checkpoint:
        compare_settings(config, functions, checkpoint, console.print, fingerprints)
    return checkpoint


def compare_settings(
    config: Config, functions: list[str], checkpoint: Path, notify: Callable, fingerprints: dict
) -> None:
    """Print the changed settings of a resumed run. Raises ValueError if state or data do not fit."""
    state, now = read_state(checkpoint, mmap=True), config.flags
    if "own_functions" not in state:
        raise ValueError(f"{checkpoint}: of an earlier version; start a new run with it as --model_path")
    for name in {*state["own_functions"]} ^ {*functions}:
        again = "the run began without one" if name in functions else "pass it to train() again"
        raise ValueError(f"{name}: {again}")
    saved = {name: value for section in state["settings"].values() for name, value in section.items()}
    for settings in saved, now:
        settings["use_kl_penalty"] = settings["use_kl_penalty"] and settings["kl_penalty_coef"] > 0
    begun = state["fingerprints"]
    others = {name: found for name, found in fingerprints.items() if begun[name] != found}
    changed = [name for name in now if name != "output_dir" and now[name] != saved.get(name, now[name])]
    is_complete = (checkpoint.parents[1] / "final").exists()
    for name in settings_that_are_fixed(now, saved, others, is_complete):
        if name in changed:
            raise ValueError(
                f"--{name}={now[name]}: this run began with {saved[name]!r}; start a new run, with a "
                "checkpoint as --model_path")
    # These change the examples, in a way that the fingerprints do not depend on.
    of_prompts = {"instruction", "max_prompt_length", "long_prompts"}
    of_examples = {*vars(config.data), "seed"} - of_prompts
    for name, found in others.items():
        if name not in now:
            notify(f"  note   {name}: files have changed since this run began")
        elif not of_examples & {*changed}:
            raise ValueError(
                f"--{name}={now[name] or now['dataset']}: its examples have changed since this run began "
                f"({begun[name]}, now {found}); restore them, or start a new run, with a checkpoint as "
                "--model_path")
    if changed:
        notify("  note   changed: " + ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in changed))


def settings_that_are_fixed(now: dict, saved: dict, others: dict, is_complete: bool) -> list[str]:
    """Return the flags that a resumed run must not change.

    now, saved   flags of the resumed run and of its checkpoint;  others  data with another fingerprint
    is_complete  True if the run had ended
    """
    fixed = [
        "use_grpo", "model_path", "chat_template", "lora_rank", "lora_alpha", "profile", "cold_start_steps",
        "use_value_head", "use_kl_penalty",
    ]
    has_no_split = Path(now["dataset"]).suffix in SUFFIXES or now["dataset"].startswith("python:")
    if now["eval_limit"] and not now["eval_dataset"] and has_no_split:
        fixed += ["seed", "eval_limit"]                   # with the rows, these choose the held-out examples
        fixed += ["dataset"] if "dataset" in others else []          # if its rows differ, not only its path
    if is_complete and now["lr_schedule"] != "constant":
        fixed += ["max_steps", "num_epochs"]              # its schedule has ended
    if not (now["reference_path"] and saved["reference_path"]):
        fixed.append("reference_path")                    # a teacher does not replace a copy of the policy
    return fixed
