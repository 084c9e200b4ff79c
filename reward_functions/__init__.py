"""Reward functions (`from reward_functions import judge`), code that calls them safely, and the sandbox."""

from importlib import import_module

MODULES = {                     # module -> its functions
    "rewards": "correctness reasoning_coherence explanation_quality",
    "reward_functions.formats":
        "last_number multiple_choice answer_pattern json_format xml_tags environment none",
    "reward_functions.arithmetic": "countdown",
    "reward_functions.heuristics": "repetition_penalty diversity safety",
    "reward_functions.tunix": "match_format_exactly match_format_approximately check_answer check_numbers",
    "reward_functions.mathematics": "math_equality",
    "reward_functions.programs": "passes_tests",
    "reward_functions.models": "classifier judge",
}
MAKERS = "classifier", "judge"               # they return a reward function
MODULE_OF = {name: module for module, names in MODULES.items() for name in names.split()}


def __getattr__(name: str):
    """Import a function when it is first used, so that the sandbox and readers of data import little else."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(MODULE_OF[name]), name)
