"""The blocks of docs/walkthrough.md print what the page shows below them, up to the last digit of a number."""

import contextlib
import io
import re

import pytest
from project_files import ROOT

PAGE = (ROOT / "docs/walkthrough.md").read_text()
NUMBER = r"-?\d+\.\d+"


def test_every_block_prints_the_output_below_it():
    names, blocks = {}, re.findall(r"```python run\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, flags=re.DOTALL)
    assert len(blocks) == PAGE.count("```python run") and PAGE.count("```text") == sum(bool(shown) for _, shown in blocks)
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "walkthrough.md", "exec"), names)
        outputs = printed.getvalue(), shown
        words, expected = (re.sub(rf" *{NUMBER}", " number", text) for text in outputs)
        assert words == expected
        found, right = ([float(number) for number in re.findall(NUMBER, text)] for text in outputs)
        assert found == pytest.approx(right, rel=0.01, abs=0.0015)
