"""What curves.png shows of held-out results."""

import json

import pytest
from matplotlib.figure import Figure

from runs.curves import draw_curves


@pytest.mark.parametrize("right,shown", [(0.0, ["length (points)"]), (0.25, ["length (points)", "accuracy"])])
def test_points_and_accuracy_have_an_interval_and_an_accuracy_of_nothing_but_0_is_left_out(tmp_path, monkeypatch, right, shown):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    points = {"eval_reward/length": 2.0, "eval_reward_low/length": 1.0, "eval_reward_high/length": 4.0}
    accuracy = {"eval_accuracy": right, "eval_accuracy_low": 0.0, "eval_accuracy_high": right + 0.1, "eval_reward/correctness": right}
    lines = [{"step": step, "phase": "eval"} | points | accuracy for step in (0, 5)] + [{"step": 5, "phase": "grpo", "mean_reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(tmp_path)
    top = drawn[0].axes[0]
    labels = [text.get_text() for text in top.get_legend().get_texts()]
    assert labels == ["mean reward in training (points)", *(f"held out: {name}, 95 % interval" for name in shown)]
    bands = [band.get_datalim(top.transData).intervaly.tolist() for band in top.collections]
    assert bands == [[1.0, 4.0], [0.0, right + 0.1]][: len(shown)]
