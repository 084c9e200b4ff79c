"""The files that belong to the project: not those a user has put beside them."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = "engine", "reward_functions", "environments", "sources", "runs", "analysis"


def files_of_the_project():
    """Files that git tracks; without git, as in an unpacked archive, those at the top, in packages and in tests."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return sorted(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())
    folders = [ROOT, *(ROOT / name for name in PACKAGES)]
    return sorted(path for folder in folders for path in folder.iterdir() if path.is_file())


def modules_of_the_program():
    """The modules at the top, but for the test, and those of the packages."""
    folders = [ROOT, *(ROOT / name for name in PACKAGES)]
    return [path for path in files_of_the_project() if path.parent in folders and path.suffix == ".py"
            and path.name not in ("test_grpo.py", "__init__.py")]
