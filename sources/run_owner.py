"""
The owner of a run folder: the process that writes to it, and the path and user that it belongs to.

owner.json of a run folder names them. The process that writes to the folder keeps a lock on that file, which
the kernel ends with the process. Files of another path or user may come from somebody else: code that their
settings name runs only if the user names it again. This does not protect against somebody who knows both.
"""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import RunError

OWNER = "owner.json"
WITHOUT_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL        # errors of such a file system
held: dict[Path, BinaryIO] = {}                           # owner.json of the folders that this process locked


def read_owner(run: Path) -> dict[str, Any]:
    """Return path, user (its number), host and process of a run folder; {} if they cannot be read."""
    try:
        owner = json.loads((run / OWNER).read_text(encoding="utf-8").partition("\n")[0])
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def lock_folder(run: Path) -> BinaryIO:
    """Lock a run folder for this process, and return its open owner.json: closing it ends the lock.

    A lock that this process holds already, as after a failed run in a notebook, is released first.

    raises  RunError if another process holds the lock, or if owner.json cannot be written
    """
    if run.resolve() in held:
        held.pop(run.resolve()).close()
    try:
        (run / OWNER).touch()
        file = (run / OWNER).open("r+b", buffering=0)
    except OSError as error:
        raise RunError(f"{run / OWNER}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            file.close()
            owner = read_owner(run)
            raise RunError(
                f"{run}: process {owner.get('process')} on {owner.get('host')} writes to it; wait for its "
                "end, or name another --output_dir"
            ) from None
    os.register_at_fork(after_in_child=file.close)        # a worker that outlives this process has no lock
    held[run.resolve()] = file
    write_owner(file, read_owner(run) | {"host": socket.gethostname(), "process": os.getpid()})
    return file


def take_over(file: BinaryIO, run: Path) -> None:
    """Write the path and the user of this process into the file that lock_folder returned."""
    write_owner(file, read_owner(run) | {"path": str(run.resolve()), "user": os.getuid()})


def write_owner(file: BinaryIO, owner: dict) -> None:
    """Replace the content, with one call for its first line: a kill leaves the old line or the new one."""
    line = json.dumps(owner).encode() + b"\n"
    os.pwrite(file.fileno(), line, 0)
    os.ftruncate(file.fileno(), len(line))


def refuse_foreign_code(run: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ValueError if settings that were saved by another path or user run code that is not given again.

    saved   settings in config.json of the run;  given  flags and settings that the user names. With resume,
            links in the folder are refused too: the run would write where they lead
    """
    owner = read_owner(run)
    if (owner.get("path"), owner.get("user")) == (str(run.resolve()), os.getuid()):
        return
    link = next((path for path in run.rglob("*") if path.is_symlink()), None)
    if link and given.get("resume"):
        raise ValueError(f"{link}: is a link, and {OWNER} does not name this folder and user; copy it")
    code = {
        "reward_functions": [name for name in saved.get("reward_functions") or [] if is_from_file(name)],
        "environment": [name for name in [saved.get("environment")] if is_from_file(name)],
        "trust_remote_code": ["true"] * bool(saved.get("trust_remote_code")),
    }
    flags = [f"--{name} {' '.join(names)}" for name, names in code.items() if names and name not in given]
    if flags:
        raise ValueError(
            f"{run}/config.json runs code, and {OWNER} does not name this folder and user; if you trust it, "
            f"give again {' '.join(flags)}"
        )


def is_from_file(name: str) -> bool:
    """Return True if a function comes from a file: neither built in nor a Python object."""
    return ":" in str(name) and not str(name).startswith("python:")
