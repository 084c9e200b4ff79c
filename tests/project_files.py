"""The modules of the program: those at the top, but for the test, and those of the packages."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = "engine", "reward_functions", "environments", "sources", "runs", "analysis"


def modules_of_the_program():
    folders = [ROOT, *(ROOT / name for name in PACKAGES)]
    return sorted(
        path for folder in folders for path in folder.glob("*.py") if path.name not in ("test_grpo.py", "__init__.py"))
