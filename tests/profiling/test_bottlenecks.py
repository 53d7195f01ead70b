"""Benchmarks of the profiler: recorded verdicts and advice, their pages, and a small run."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.bottlenecks import advice, recording
from benchmarks.bottlenecks.cases import CASES, PAIRS, WITHOUT_CONTROL
from benchmarks.bottlenecks.matrix import Row, load, matrix, right
from benchmarks.bottlenecks.workloads import images, measure
from benchmarks.bottlenecks.workloads.__main__ import JSON, PAGE
from benchmarks.bottlenecks.workloads.page import page, reports
from benchmarks.bottlenecks.workloads.workload import Workload, epoch
from benchmarks.figures.markers import used
from benchmarks.figures.results import RESULTS
from fusedops.profiling.advice.advice import Saving
from fusedops.profiling.report import Profile
from profiling.cases import trainer
from profiling.synthetic import MS, matmul, step

ROOT = Path(__file__).parents[2]
RECORDED = load(Path(__file__).parent / "recorded")  # `make profile-matrix` records them
ALL = CASES | PAIRS


# Steps with a known bottleneck.


def test_every_case_was_recorded_with_five_seeds():
    assert set(RECORDED) == set(ALL)
    for name, rows in RECORDED.items():
        runs = {(row.seed, row.control) for row in rows}
        controls = [False] if name in WITHOUT_CONTROL else [False, True]
        assert runs == {(seed, control) for seed in range(5) for control in controls}


def test_the_matrix():
    """95 % of the cases, every pair and every control; docs/profile_matrix.md shows it."""
    text, enough = matrix(RECORDED, ALL)
    assert enough, text
    assert text in (ROOT / "docs/profile_matrix.md").read_text()


def test_a_matrix_can_fail():
    """The evidence of another case in a case's place is not right."""
    for name, case in ALL.items():
        other = "compute" if name not in ("compute", "noise") else "bandwidth"
        wrong = next(row for row in RECORDED[other] if not row.control)
        swapped = Row(wrong.seed, False, wrong.evidence)
        assert not right(case, swapped)[0] and not matrix({name: [swapped]}, ALL)[1]


# Predicted and measured savings.


def row(predicted, measured, low, high, tip="patch"):
    size = 2**20, 2**21
    return advice.Row("llama", "train", tip, 40 * MS, predicted, measured, low, high, *size)


def test_the_summary_of_rows():
    """An interval with 0 does not count, and neither does a row without a prediction; a wrong sign
    is not within a factor of 2."""
    rows = [row(0.03, 0.02, 0.01, 0.04), row(0.01, 0.03, 0.01, 0.04)]
    rows += [row(-0.01, 0.01, 0.005, 0.02), row(0.09, 0.01, -0.01, 0.02)]
    rows += [row(None, 0.01, 0.005, 0.02, "bf16"), row(0.01, 0.01, 0.005, 0.02, "bf16")]
    lines = list(advice.table(rows))
    assert "2 of 6 rows are excluded. Of the 4" in lines
    assert "others, the sign is right in 3, and the factor is at most 2 in 2." in lines
    assert lines[-2:] == ["| patch | 4 | 1 | 2 | 1 |", "| bf16 | 2 | 1 | 1 | 1 |"]


def test_savings_are_shares_of_the_step_that_they_were_found_in():
    """The profiled step takes 40 ms, and 80 while the saving was measured."""
    report = Profile(step(matmul(40 * MS)))
    (tip,) = [tip for tip in report.advice if tip.id == "bf16"]
    saving = Saving(8 * MS, 2**20, (4 * MS, 16 * MS), 80 * MS)
    report._advice = [replace(tip, predicted=Saving(2 * MS, 2**21), measured=saving)]
    (saved,) = advice.advice_rows(report, "llama", "train", {})
    assert abs(saved.predicted - 0.05) < 2e-3
    assert (saved.measured, saved.low, saved.high) == (0.1, 0.05, 0.2)
    assert (saved.predicted_bytes, saved.measured_bytes) == (2**21, 2**20)


def test_trimmed_batches_have_the_same_samples():
    def samples(batches):
        return sorted(
            tuple(ids[mask == 1].tolist() + labels[mask == 1].tolist())
            for batch in batches
            for ids, mask, labels in zip(*batch.values(), strict=True)
        )

    before = advice.padded_data(4, 64)[:4]
    after = advice.sorted_and_trimmed(before)
    assert samples(before) == samples(after) and len(after) == 4
    masks = [torch.cat([b["attention_mask"].flatten() for b in x]) for x in (before, after)]
    padding = [1 - mask.float().mean() for mask in masks]
    assert padding[0] > 0.2 and padding[1] < 0.5 * padding[0]
    assert all((b["labels"] == -100).equal(b["attention_mask"] == 0) for b in after)


def test_the_page_of_savings_is_that_of_the_results():
    """`python -m benchmarks.bottlenecks.advice --only-write` writes it again."""
    document = json.loads((ROOT / advice.RESULTS).read_text())
    assert advice.page(document) == (ROOT / advice.PAGE).read_text()
    document["rows"][0]["measured"] += 0.1
    assert advice.page(document) != (ROOT / advice.PAGE).read_text()


# Four real workloads.


def test_the_page_of_workloads_is_that_of_the_results():
    """`python -m benchmarks.bottlenecks.workloads --only-write` writes it again.

    Little of a step is unexplained, and the first advice was measured.
    """
    document = json.loads((ROOT / JSON).read_text())
    judged = reports(document)
    assert page(document, JSON, judged) == (ROOT / PAGE).read_text()
    for workload in document["rows"]:
        report = judged[workload["title"]]
        assert report.verdict.shares["unknown"][1] <= 0.15
        measured = {tip.id: tip.measured for tip in report.advice}[workload["tried"][0]]
        assert measured.interval[0] < measured.seconds < measured.interval[1]
    text = json.dumps(document)
    assert str(ROOT) not in text and "/tmp" not in text


class SlowStack:
    """Stacks samples, after a sleep that the change leaves out."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, samples):
        time.sleep(self.seconds)
        return torch.stack(samples)


def small():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    samples, train = list(torch.randn(80, 16)), trainer(model, optimizer)

    def loader(seconds):
        return DataLoader(samples, 2, collate_fn=SlowStack(seconds))

    def faster():
        blocks = loader(0.005), loader(0.0)
        return [lambda data=data: epoch(train, data, skipped=30) / 10 for data in blocks]

    return Workload(
        "A layer is trained.", train, loader(0.005), model, optimizer, {"collate": faster}
    )


def test_the_first_advice_is_applied(monkeypatch):
    """The loader sleeps 5 ms a step: that is found, left out, and seen to be gained."""
    monkeypatch.setattr(measure, "PROFILE_S", 4.0)
    measured = json.loads(json.dumps(measure.measure("small", small(), budget_s=0.1)))
    assert measured["order"][0] == measured["tried"][0] == "collate"
    report = reports({"rows": [measured]})["small"]
    assert report.verdict.bounds == ("input",) and report.advice[0].id == "collate"
    low, high = report.advice[0].measured.interval
    assert low > 0 and high > 2.5e-3  # on a busy machine a sleep takes longer than asked
    shown = page({"rows": [measured]}, "file.json", {"small": report})
    assert "The first advice, a faster __call__: a step takes" in shown and "less time" in shown


def test_images_are_the_same_when_decoded_once():
    pytest.importorskip("PIL")
    pytest.importorskip("matplotlib")
    every, once = images.Photographs(4), images.Photographs(4, decoded=True)
    for (pixels, turns), (other, same) in zip(map(every.__getitem__, range(4)), once, strict=False):
        assert turns == same and pixels.shape == other.shape == (3, images.SIDE, images.SIDE)
        assert (pixels - other).abs().mean() < 0.3 * pixels.std()
    assert not torch.equal(every[0][0], every[images.PIECES][0])  # augmented in another way


def test_recording_the_demo_costs_less_than_one_percent():
    """What `python -m benchmarks.bottlenecks.recording` measured on an AMD EPYC."""
    path = RESULTS / "amd-epyc-family-25-model-17" / "recording.json"
    document = json.loads(path.read_text())
    assert [row["contender"] for row in document["rows"]] == ["eager", "fused"]
    for measured in document["rows"]:
        _, low, high = measured["overhead"]
        assert low < high < recording.AT_MOST
        assert 0 < measured["own_cpu_s"] < recording.AT_MOST * measured["step_s"]
    shown = used((ROOT / "docs/guides/profile.md").read_text())
    assert {f"recording.{name}.overhead" for name in ("eager", "fusedops")} <= shown
