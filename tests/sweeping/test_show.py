"""The rows of fusedops.sweep as JSON, as a table and as a figure."""

import json

import pytest

from fusedops.measuring.ratios import Ratio
from fusedops.sweeping import figure
from fusedops.sweeping.result import Sweep
from fusedops.sweeping.row import SweepRow


def test_results_go_through_json(tmp_path):
    rows = (
        SweepRow("eager", 1, None, 0.1, (0.09, 0.11), throughput=10.0, samples=7),
        SweepRow(
            "patched",
            1,
            None,
            0.05,
            (0.04, 0.06),
            ratio=Ratio(2.0, 1.9, 2.1),
            samples=120,
            p95=0.06,
            p99=0.07,
            throughput=20.0,
            seconds_per_sample=0.05,
            peak_bytes=2**20,
        ),
        SweepRow("patched", 2, None, skipped_reason="the budget is used up"),
    )
    sweep = Sweep("train", rows, {"device": "a CPU", "threads": 1, "model": "Net"})
    sweep.save(tmp_path / "sweep.json")
    assert Sweep.load(tmp_path / "sweep.json") == sweep
    assert len(json.loads((tmp_path / "sweep.json").read_text())["rows"]) == 3


def test_the_table_says_what_it_does_not_know():
    sweep = Sweep(
        "train",
        (
            SweepRow(
                "eager",
                1,
                None,
                0.1,
                (0.09, 0.11),
                throughput=10.0,
                samples=30,
                seconds_per_sample=0.1,
                p95=0.12,
                peak_bytes=2**20,
                predicted_bytes=3 * 2**19,
                noisy=True,
            ),
        ),
        {},
    )
    head, line, quantiles, predicted, noise = sweep.table().splitlines()
    assert head.split("  ")[0] == "variant"
    assert "100 ms (90.0..110.0)" in line or "100 ms (90..110)" in line
    assert "120 ms" in line and "p95 needs 20 samples and p99 100" in quantiles
    assert "+50.0%" in line and predicted.startswith("predicted: ")
    assert line.endswith("noisy")
    assert noise.startswith("noisy: ")


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_the_figure(tmp_path, ending):
    pytest.importorskip("matplotlib")
    curve = [(1, 10.0), (2, 18.0), (4, 18.5)]
    rows = tuple(
        SweepRow(name, b, 8, b / t / k, None, throughput=k * t, samples=9, tokens_per_s=8 * k * t)
        for name, k in (("eager", 1), ("patched", 2))
        for b, t in curve
    )
    about = {"device": "a CPU", "threads": 1, "model": "Net"}
    path = tmp_path / f"sweep.{ending}"
    Sweep("train", rows, about).plot(path, p95=0.2)
    content = path.read_bytes()
    assert len(content) > 2000
    if ending == "svg":
        for text in ("eager", "patched", "budget 200 ms", "knee", "numbers: batch", "batch 4 "):
            assert text.encode() in content
    with pytest.raises(ValueError, match="plot needs a row that was measured"):
        Sweep("train", (), about).plot(path)


def test_the_figure_has_room_for_every_point():
    """A knee's circle and a point's number are not cut at the top or right edge."""
    pytest.importorskip("matplotlib")
    rows = tuple(
        SweepRow("eager", b, 8, t, None, throughput=r, samples=9, tokens_per_s=8 * r)
        for b, t, r in [(1, 0.1, 10.0), (2, 0.15, 20.0), (4, 0.4, 15.0)]
    )
    drawn = figure._figure("train", rows, {"model": "Net"}, None)
    drawn.canvas.draw()
    (axes,) = drawn.axes
    right, top = axes.transAxes.transform((1, 1))
    for row in rows:
        x, y = axes.transData.transform((row.p50, row.tokens_per_s))
        assert y + 12 * drawn.dpi / 72 < top and x + 8 * drawn.dpi / 72 < right
