"""The files that belong to the project: not those a user has put beside them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = "engine", "reward_functions", "environments", "sources", "runs", "analysis"


def files_of_the_project():
    """Files that git tracks; without git, as in an unpacked archive, all files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return sorted(path for path in ROOT.rglob("*") if path.is_file())
    return sorted(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def modules_of_the_program():
    """The modules at the top, but for the test, and those of the packages."""
    folders = [ROOT, *(ROOT / name for name in PACKAGES)]
    return [path for path in files_of_the_project() if path.parent in folders and path.suffix == ".py"
            and path.name not in ("test_grpo.py", "__init__.py")]
