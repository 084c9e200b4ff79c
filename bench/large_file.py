"""
How much memory a .jsonl file of a gigabyte takes: as the program reads it, against a list of all its rows.

    python bench/large_file.py          prints a table; takes a gigabyte on the disk meanwhile

Each line is a fresh process that goes through all examples once, in a shuffled order, and prints its peak. The first one has
read a file of one example, and so is what Python and the libraries take.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def write_file(path: Path, size: int) -> None:
    """Examples of about a kilobyte, until the file has so many bytes."""
    number = written = 0
    with path.open("w") as file:
        while written < size:
            row = {"prompt": f"{number} " + "and so on " * 60, "answer": str(number), "completion": "step by step " * 20}
            written += file.write(json.dumps(row) + "\n")
            number += 1


def measure(how: str, path: str) -> None:
    """Go through a file once and print examples, seconds before the first one, seconds in all, and the peak in GB."""
    from runs.command_line import parse_config
    from sources.batches import ShuffledBatches
    from engine.devices import peak_memory_gb
    from runs.setup import load_data, torch

    started = time.perf_counter()
    if how == "list":
        with open(path) as file:
            examples = [json.loads(line) for line in file]
    else:
        examples, _ = load_data(parse_config(["--dataset", path, "--eval_limit", "0"]))
    ready, batches = time.perf_counter(), ShuffledBatches(examples, 64, seed=0)
    for _ in range(max(1, len(examples) // 64)):
        next(batches)
    ended, peak = time.perf_counter(), peak_memory_gb(torch.device("cpu"))
    print(f"{len(examples)} | {ready - started:.1f} | {ended - started:.1f} | {peak:.2f} |")


def main() -> None:
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
        return
    print("| file | read | examples | seconds before the first | for all of them | peak GB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.jsonl"
        for size, how in (1, "when asked for"), (10**9, "when asked for"), (10**9, "list"):
            if not path.exists() or path.stat().st_size < size:
                write_file(path, size)
            command = [sys.executable, __file__, "list" if how == "list" else "view", str(path)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            print(f"| {path.stat().st_size / 1e9:.2f} GB | {how} | {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
