"""docs/truth_table.py: its expectations against formulas by hand, identities, and sampled groups."""

import re
import runpy
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from grpo import LOSSES, compute_group_advantages

table = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/truth_table.py")))
P, TRUE = table.P, table.P * (1 - table.P)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("G", [2, 4, 16])
def test_leave_one_out_in_points_is_right_on_average_and_the_group_mean_is_short_by_one_part_in_G(G):
    close(table.exact(G, "leave_one_out", "none")["mean"], TRUE)
    close(table.exact(G, "group_mean", "none")["mean"], TRUE * (G - 1) / G)


@pytest.mark.parametrize("baseline,scale,loss_type,age", [
    ("group_mean", "group", "dapo", 0), ("group_median", "mean", "gspo", 1), ("leave_one_out", "none", "icepop", 8),
    ("global_mean", "group", "sapo", 8),
])
def test_a_hundred_thousand_sampled_groups_agree_within_their_error(baseline, scale, loss_type, age):
    result, N, G = table.exact(4, baseline, scale, loss_type, age), 100_000, 4
    generator = torch.Generator().manual_seed(1)
    for n in 2, 7, 13:                                    # of P
        before = torch.sigmoid(torch.logit(P[n]) - age * table.STEP)
        right = (torch.rand(N, G, generator=generator, dtype=torch.float64) < before).double()
        advantages = compute_group_advantages(right, baseline=baseline, scale=scale, global_mean=float(P.mean()))
        groups = table.gradients(right, advantages, P[n].expand(N), age, loss_type=loss_type)
        assert abs(groups.mean() - result["mean"][n]) < 4 * groups.std() / N**0.5, (n, groups.mean(), result["mean"][n])
        assert groups.var() == pytest.approx(float(result["variance"][n]), rel=0.05)
        assert (groups == 0).double().mean() == pytest.approx(float(result["no_signal"][n]), abs=0.01)


def test_the_page_has_its_figures():
    page = (ROOT / "docs/algorithm.md").read_text().partition("### Which one?")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| scale (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page, re.M)
    assert len(rows) == 6
    for scale, G, rare, sure, noise in rows:
        result = table.exact(int(G), "group_mean", scale)
        weights, found = table.weights(result["mean"]), table.summary(result)
        assert (rare, sure, noise) == tuple(f"{x:.2f}" for x in (weights["0.05"], weights["0.95"], found["noise"]))
    rows = re.findall(r"^\| ([a-z_, ]+?)(?:: [a-z ]+)? \|(( [\d.]+ \|){5})$", page, re.M)
    assert {name for names, *_ in rows for name in names.split(", ")} == set(LOSSES)
    for names, cells, _ in rows:
        for name in names.split(", "):
            kept = [table.summary(table.exact(8, "leave_one_out", "none", name, age)) for age in (1, 4, 8)]
            figures = [*(each["length"] for each in kept), kept[-1]["cosine"], kept[-1]["noise"]]
            assert re.findall(r"[\d.]+", cells) == [f"{figure:.2f}" for figure in figures], name
