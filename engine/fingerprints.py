"""Fingerprints identify examples and model folders by their content, not by paths and names."""

import hashlib
import json
import re
from pathlib import Path

BLOCK, BLOCKS = 2**12, 256      # bytes per read, and number of reads, evenly spaced over a file


def fingerprint_of_model(path: str | Path) -> str:
    """Hash the configuration, and the sizes and parts of weight files, in a folder; "" for a hub id."""
    folder = Path(path or "no folder")
    files = [file for name in ("config.json", "*.safetensors", "*.bin") for file in folder.glob(name)]
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                opened.seek(start)
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()[:32] if files else ""


def fingerprint_of_functions(names: list[str]) -> str:
    """Hash the files of the functions that are named path/to/file.py:function; "" if there are none."""
    files = [Path(name.rpartition(":")[0]) for name in names]
    texts = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16] if texts else ""


def fingerprint_of_examples(examples: list[dict]) -> str:
    """Count and hash examples in order. The result is the same in all processes, for sets and objects too."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example, default=as_json, skipkeys=True).encode())
    return f"{len(examples)} examples, {digest.hexdigest()[:16]}"


def as_json(value):
    """Convert other values for json.dumps: sets to sorted lists, objects to text without addresses."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return re.sub("0x[0-9a-f]+", "", repr(value))
