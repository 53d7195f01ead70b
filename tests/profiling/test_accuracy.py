"""Benchmark of the profiler's advice: predicted and measured savings, page and padded batches."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.bottlenecks.advice import (
    PAGE,
    RESULTS,
    STEP,
    Row,
    advice_rows,
    padded_data,
    page,
    sorted_and_trimmed,
    table,
)
from fusedops.profiling.advice.advice import Saving
from fusedops.profiling.report import Profile
from profiling.synthetic import MS, matmul, step

ROOT = Path(__file__).parents[2]


def row(predicted, measured, low, high, advice="patch"):
    return Row("llama", "train", advice, 40 * MS, predicted, measured, low, high, 2**20, 2**21)


def test_the_summary_of_rows():
    """An interval with 0 does not count, and neither does a row without a prediction; a wrong sign
    is not within a factor of 2."""
    rows = [row(0.03, 0.02, 0.01, 0.04), row(0.01, 0.03, 0.01, 0.04)]
    rows += [row(-0.01, 0.01, 0.005, 0.02), row(0.09, 0.01, -0.01, 0.02)]
    rows += [row(None, 0.01, 0.005, 0.02, "bf16"), row(0.01, 0.01, 0.005, 0.02, "bf16")]
    lines = list(table(rows))
    assert "2 of 6 rows are excluded. Of the 4" in lines
    assert "others, the sign is right in 3, and the factor is at most 2 in 2." in lines
    assert lines[-2:] == ["| patch | 4 | 1 | 2 | 1 |", "| bf16 | 2 | 1 | 1 | 1 |"]
    assert lines[2] == (
        "| llama | train | patch | 40 | 3.0% | 2.0% (1.0%..4.0%) | 0.67 | 1.0 | 2.0 |"
    )


def test_savings_are_shares_of_the_step_that_they_were_found_in():
    """The profiled step takes 40 ms, and 80 while the saving was measured."""
    report = Profile(step(matmul(40 * MS)))
    (tip,) = [tip for tip in report.advice if tip.id == "bf16"]
    saving = Saving(8 * MS, 2**20, (4 * MS, 16 * MS), 80 * MS)
    report._advice = [replace(tip, predicted=Saving(2 * MS, 2**21), measured=saving)]
    (row,) = advice_rows(report, "llama", "train", {})
    assert abs(row.predicted - 0.05) < 2e-3 and row.measured == 0.1
    assert (row.low, row.high, row.predicted_bytes, row.measured_bytes) == (
        0.05,
        0.2,
        2**21,
        2**20,
    )
    report._advice = [replace(tip, measured=None)]
    assert list(advice_rows(report, "llama", "train", {})) == []


def test_trimmed_batches_have_the_same_samples():
    def samples(batches):
        return sorted(
            tuple(ids[mask == 1].tolist() + labels[mask == 1].tolist())
            for batch in batches
            for ids, mask, labels in zip(*batch.values(), strict=True)
        )

    before = padded_data(STEP)[:4]
    after = sorted_and_trimmed(before)
    assert samples(before) == samples(after) and len(after) == 4
    padding = [
        1 - torch.cat([b["attention_mask"].flatten() for b in x]).float().mean()
        for x in (before, after)
    ]
    assert padding[0] > 0.2 and padding[1] < 0.5 * padding[0]
    assert all((b["labels"] == -100).equal(b["attention_mask"] == 0) for b in after)


def test_the_page_is_that_of_the_results():
    """`python -m benchmarks.bottlenecks.advice --only-write` writes it again."""
    document = json.loads((ROOT / RESULTS).read_text())
    assert page(document) == (ROOT / PAGE).read_text()
    document["rows"][0]["measured"] += 0.1
    assert page(document) != (ROOT / PAGE).read_text()
