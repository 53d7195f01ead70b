"""The profiler benchmark's four real workloads: recorded results, their page, and a small run."""

import copy
import functools
import json
import statistics
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.bottlenecks import recording
from benchmarks.bottlenecks.workloads import WORKLOADS, images, measure, sentences
from benchmarks.bottlenecks.workloads.__main__ import JSON, PAGE
from benchmarks.bottlenecks.workloads.page import page, reports
from benchmarks.bottlenecks.workloads.workload import Workload, epoch
from benchmarks.figures.markers import used
from benchmarks.figures.results import RESULTS

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / JSON).read_text())
ROWS = {row["title"]: row for row in RECORDED["rows"]}


@functools.cache
def judged():
    return reports(RECORDED)


def test_the_page_is_that_of_the_results():
    """`python -m benchmarks.bottlenecks.workloads --only-write` writes it again."""
    text = (ROOT / PAGE).read_text()
    assert page(RECORDED, JSON, judged()) == text
    row = copy.deepcopy(ROWS["images"])
    row["report"]["evidence"]["plain"]["wait"] = [0.0] * 20
    changed = reports({"rows": [row]})
    assert page(RECORDED, JSON, judged() | changed) != text


@pytest.mark.parametrize("name", WORKLOADS)
def test_shares_sum_to_all_and_little_is_unexplained(name):
    shares = judged()[name].verdict.shares
    assert sum(middle for _, middle, _ in shares.values()) == pytest.approx(1, abs=0.02)
    assert shares["unknown"][1] <= 0.15


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_first_advice_was_measured(name):
    row, report = ROWS[name], judged()[name]
    measured = {tip.id: tip.measured for tip in report.advice}
    low, high = measured[row["tried"][0]].interval
    assert low < measured[row["tried"][0]].seconds < high


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_report_does_not_name_the_machine_it_was_made_on(name):
    """Paths are relative to the working directory."""
    assert str(ROOT) not in json.dumps(ROWS[name]) and "/tmp" not in json.dumps(ROWS[name])


class Slow:
    """Stacks samples, after a sleep that the change leaves out."""

    slept: ClassVar = []  # seconds; on a busy machine a sleep takes longer than asked

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, samples):
        start = time.perf_counter()
        time.sleep(self.seconds)
        if self.seconds:
            self.slept.append(time.perf_counter() - start)
        return torch.stack(samples)


def small():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    samples = list(torch.randn(80, 16))

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def loader(seconds):
        return DataLoader(samples, 2, collate_fn=Slow(seconds))

    def faster():
        blocks = loader(0.005), loader(0.0)
        return [lambda data=data: epoch(step, data, skipped=30) / 10 for data in blocks]

    return Workload(
        "A layer is trained.", step, loader(0.005), model, optimizer, {"collate": faster}
    )


def test_the_first_advice_is_applied(monkeypatch):
    """The loader sleeps 5 ms a step: that is found, left out, and seen to be gained."""
    monkeypatch.setattr(measure, "PROFILE_S", 4.0)
    monkeypatch.setattr(Slow, "slept", [])
    row = json.loads(json.dumps(measure.measure("small", small(), budget_s=0.1)))
    assert row["order"][0] == row["tried"][0] == "collate"
    assert "patch" in row["tried"] or "patch" not in row["order"]
    report = reports({"rows": [row]})["small"]
    assert report.verdict.bounds == ("input",) and report.advice[0].id == "collate"
    low, high = report.advice[0].measured.interval
    tens = [Slow.slept[i : i + 10] for i in range(0, len(Slow.slept), 10)]  # as `faster` times them
    longest = float(f"{max(map(statistics.mean, tens)):.3g}")  # three digits, as the report has
    assert 0 < low <= longest and high * 2 > statistics.median(Slow.slept)
    shown = page({"rows": [row]}, "file.json", {"small": report})
    assert "The first advice, a faster __call__: a step takes" in shown and "less time" in shown


def test_an_epoch_skips_the_batches_until_workers_have_caught_up():
    seen = []

    def batches():
        for index in range(5):
            if index < 2:
                time.sleep(0.05)
            yield index

    assert epoch(seen.append, batches(), skipped=2, wall=True) < 0.05
    assert epoch(seen.append, batches(), wall=True) >= 0.05
    assert seen == [*range(5), *range(5)]


def test_images_are_the_same_when_decoded_once():
    pytest.importorskip("PIL")
    pytest.importorskip("matplotlib")
    every, once = images.Photographs(4), images.Photographs(4, decoded=True)
    for (pixels, turns), (other, same) in zip(map(every.__getitem__, range(4)), once, strict=False):
        assert turns == same and pixels.shape == other.shape == (3, images.SIDE, images.SIDE)
        assert (pixels - other).abs().mean() < 0.3 * pixels.std()
    assert not torch.equal(every[0][0], every[images.PIECES][0])  # augmented in another way


def test_pairs_of_sentences_are_in_no_order_of_length():
    pairs = sentences.pairs()
    assert len(pairs) > 300 and pairs == sentences.pairs()
    lengths = torch.tensor([len(doc) for _, doc in pairs[:200]], dtype=torch.float)
    assert torch.corrcoef(torch.stack([lengths, torch.arange(200.0)]))[0, 1].abs() < 0.3
    assert all("_" not in name for name, _ in pairs)


def test_recording_the_demo_costs_less_than_one_percent():
    """What `python -m benchmarks.bottlenecks.recording` measured on an AMD EPYC."""
    path = RESULTS / "amd-epyc-family-25-model-17" / "recording.json"
    document = json.loads(path.read_text())
    assert [row["contender"] for row in document["rows"]] == ["eager", "fused"]
    for row in document["rows"]:
        _, low, high = row["overhead"]
        assert low < high < recording.AT_MOST
        assert 0 < row["own_cpu_s"] < recording.AT_MOST * row["step_s"]
    shown = used((ROOT / "docs/guides/profile.md").read_text())
    assert {f"recording.{name}.overhead" for name in ("eager", "fusedops")} <= shown
