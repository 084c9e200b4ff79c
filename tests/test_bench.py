"""The measurement for a GPU runs through on the CPU, with a tiny model."""

import pytest
from conftest import run_process


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_table_of_a_gpu_is_filled_on_the_cpu(tmp_path):
    done = run_process("bench/gpu.py", "--tiny", "--output", tmp_path / "gpu.md", CUDA_VISIBLE_DEVICES="")
    written = (tmp_path / "gpu.md").read_text()
    assert written == done.stdout and "7 passed" in written and "TFLOP/s" in written
    table = [row.strip("| ").split(" | ") for row in written.splitlines() if row.startswith("| tiny")]
    rows = {name: cells for name, *cells in table}
    for name in "tiny", "tiny, LoRA":
        step, sampling, _, training, _, peak = rows[name]
        assert all(float(value) > 0 for value in (step, sampling, training, peak)), rows
    assert len(rows) == 3
