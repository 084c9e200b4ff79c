"""docs/truth_table.py: its expectations against formulas by hand, identities, and sampled groups."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo import LOSSES, compute_group_advantages

table = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "docs/truth_table.py")))
P, TRUE = table.P, table.P * (1 - table.P)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("G", [2, 4, 16])
def test_leave_one_out_in_points_is_right_on_average_and_the_group_mean_is_short_by_one_part_in_G(G):
    close(table.exact(G, "leave_one_out", "none")["mean"], TRUE)
    close(table.exact(G, "group_mean", "none")["mean"], TRUE * (G - 1) / G)


def test_a_group_of_two_by_hand():
    """One right, one wrong, with probability 2 p (1 - p): A = +-1 / sqrt(2), scores 1 - p and -p, mean over two."""
    result = table.exact(2, "group_mean", "group")
    gain, chance = 0.5**0.5 / 2, 2 * TRUE
    close(result["mean"], chance * gain, 1e-7)
    close(result["variance"], chance * gain**2 - (chance * gain) ** 2, 1e-7)
    close(result["no_signal"], P**2 + (1 - P) ** 2)


@pytest.mark.parametrize("G", [2, 4, 16])
def test_dividing_by_the_mean_is_maximum_likelihood_to_order_G_minus_1(G):
    """The gradient of -sum((1 - p)^n / n, n = 1 ... G - 1), for both baselines up to G / (G - 1)."""
    expected = TRUE * sum((1 - P) ** n for n in range(G - 1))
    close(table.exact(G, "group_mean", "mean")["mean"], expected, 1e-7)
    close(table.exact(G, "leave_one_out", "mean")["mean"], expected * G / (G - 1), 1e-7)


def test_the_standard_deviation_makes_it_the_arcsine_when_groups_are_large():
    ratio = table.exact(256, "group_mean", "group")["mean"] / TRUE.sqrt()
    middle = (P >= 0.1) & (P <= 0.9)
    close(ratio[middle], torch.ones(int(middle.sum())), 0.03)


@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if name not in ("reinforce", "cispo", "scale_rl")])
def test_old_rollouts_are_corrected_where_nothing_is_clipped(loss_type):
    """Importance sampling has no bias. sapo's gate has slope 1 at a ratio of 1 alone; gspo's root is another ratio."""
    bounds = LOSSES[loss_type].bounds
    free = {"clip_low": 0.999, "clip_high": 1e6, **{name: bounds[name][1] for name in ("beta", "delta") if name in bounds}}
    free |= {"alpha": 0.0} if "alpha" in bounds else {}
    mean = table.exact(8, "leave_one_out", "none", loss_type, 8, **free)["mean"]
    if loss_type in ("gspo", "sapo"):
        assert not torch.allclose(mean, TRUE, rtol=0.01)
    else:                                                 # the baseline is the old success rate: without effect on the mean
        close(mean, TRUE)
    assert not torch.allclose(table.exact(8, "leave_one_out", "none", "reinforce", 8)["mean"], TRUE, rtol=0.01)


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
    page = (Path(__file__).parents[1] / "docs/algorithm.md").read_text().partition("### Which one?")[2].partition("\n## ")[0]
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


def test_it_prints_a_row_for_each_loss_and_draws(tmp_path, capsys):
    table.show_losses(4)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert {row[0].strip("| ") for row in rows[1:]} == set(LOSSES) and all(row[1] == "1.00" for row in rows[1:])
    table.draw(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5000
