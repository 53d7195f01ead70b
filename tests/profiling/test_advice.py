"""The profiler's advice: its formulas on synthetic measurements, and experiments on real steps."""

import re
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import fusedops
from fusedops.machine import usable_cpus
from fusedops.measuring.blocks import compare_blocks
from fusedops.measuring.changes import CHANGES, Target
from fusedops.optim import AdamW, AdamW8bit
from fusedops.profiling.advice import trial
from fusedops.profiling.advice.advice import saving
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.advice.trial import ALL_SAFE
from fusedops.profiling.evidence import Loader, Tokens
from fusedops.profiling.judge import judge
from fusedops.profiling.report import Profile
from profiling.cases import batches, everything, same, trainer, workload
from profiling.synthetic import MS, gather, matmul, run, step, stream, tiny

SLOW = Loader(batches_per_s=25.0, functions={"collate (data.py:41)": 0.8})


def advice(evidence):
    return {tip.id: tip for tip in advise(evidence, judge(evidence))}


def seconds(evidence, name):
    return advice(evidence)[name].predicted.seconds


def test_workers_hide_the_loader_up_to_its_speed():
    """The loader needs 40 ms a batch, the step 10: one more worker is still the bound."""
    waits = step(matmul(10 * MS), wait=40 * MS, loader=SLOW, threads=1, cpus=2.0)
    assert seconds(waits, "workers") == pytest.approx(10 * MS, rel=0.05)
    assert seconds(replace(waits, cpus=9.0), "workers") == pytest.approx(40 * MS, rel=0.05)
    slower = replace(waits, cpus=9.0, loader=replace(SLOW, batches_per_s=30.0))
    assert "num_workers=4 " in advice(slower)["workers"].title
    assert "num_workers=1 " in advice(replace(slower, cpus=2.0))["workers"].title
    assert "workers" not in advice(replace(waits, cpus=1.0))
    assert "workers" not in advice(replace(waits, loader=replace(SLOW, asynchronous=True)))
    assert "workers" not in advice(step(matmul(10 * MS), loader=SLOW))


def test_workers_need_a_cpu_that_is_free():
    """Other programs that hold up the step would hold up a worker too."""
    for preempted, free in ((1 * MS, True), (20 * MS, False)):
        held_up = run(10 * MS, wait=40 * MS, preempted=preempted)
        waits = step(matmul(10 * MS), plain=held_up, loader=SLOW)
        assert ("workers" in advice(waits)) == free


def test_collate_is_its_share_of_the_wait():
    waits = step(matmul(10 * MS), wait=40 * MS, loader=SLOW)
    assert seconds(waits, "collate") == pytest.approx(32 * MS, rel=0.05)
    assert "data.py:41" in advice(waits)["collate"].why
    held_up = replace(waits, plain=run(10 * MS, wait=40 * MS, preempted=20 * MS))
    assert seconds(held_up, "collate") == pytest.approx(16 * MS, rel=0.05)


def test_padding():
    """Without an elasticity, all of the padding's time: an upper bound."""
    padded = Tokens(real=60.0, padded=100.0, samples=4)
    evidence = step(matmul(10 * MS), tokens=padded)
    assert seconds(evidence, "padding") == pytest.approx(4 * MS, rel=0.05)
    assert advice(evidence)["padding"].formula.startswith("at most: ")
    assert "padding" not in advice(replace(evidence, tokens=Tokens(90.0, 100.0, 4)))


@pytest.mark.parametrize("elasticity", [0.0, 0.5, 1.0])
def test_padding_saves_what_scales_with_the_batch(elasticity):
    padded = Tokens(real=64.0, padded=100.0, samples=4)
    evidence = step(matmul(10 * MS), tokens=padded, elasticity=elasticity)
    saved = 10 * MS * (1 - 0.64**elasticity)
    assert seconds(evidence, "padding") == pytest.approx(saved, rel=0.05, abs=0.2 * MS)
    assert advice(evidence)["padding"].formula.startswith("at most: ")


def test_page_faults():
    faults = run(20 * MS, seed=1, user=0.2, system=0.2, faults=400_000)
    evidence = step(stream(20 * MS, 0.3), cached=faults)
    assert seconds(evidence, "keep_freed_memory") == pytest.approx(10 * MS, rel=0.05)
    assert "keep_freed_memory" not in advice(step(stream(20 * MS)))


def test_threads():
    evidence = step(matmul(20 * MS), fewer_threads=run(8 * MS, seed=3), threads=8)
    assert seconds(evidence, "threads") == pytest.approx(12 * MS, rel=0.05)


def test_launch_bound_steps_get_a_batch_and_a_compiler():
    evidence = step(tiny(10 * MS), elasticity=0.0)
    assert seconds(evidence, "batch") == pytest.approx(5 * MS, rel=0.05)
    assert seconds(evidence, "compile") == pytest.approx(10 * MS, rel=0.05)
    faster = step(tiny(10 * MS), elasticity=-0.5)  # half the batch takes longer
    assert seconds(faster, "batch") == pytest.approx(5 * MS, rel=0.05)
    assert not {"batch", "compile"} & set(advice(step(matmul(10 * MS), elasticity=1.0)))


def test_frozen_weights_are_quantized():
    about = {"parameter_bytes": 4000, "frozen_bytes": 3200, "frozen_elements": 800}
    assert advice(step(matmul(10 * MS), about=about))["quantize_lora"].predicted.bytes == 2750
    assert "quantize_lora" not in advice(step(matmul(10 * MS), about=about | {"frozen_bytes": 9}))


def test_a_step_at_the_peak_gets_none():
    assert set(advice(step(matmul(10 * MS, 1.0), elasticity=1.0))) == {"bf16", "none"}
    assert "none" not in advice(step(gather(10 * MS)))


def test_the_largest_gain_comes_first():
    entries = advise(*(lambda e: (e, judge(e)))(step(matmul(10 * MS), wait=40 * MS, loader=SLOW)))
    assert [tip.id for tip in entries][:2] == ["collate", "workers"]


def live(**options):
    model, optimizer = workload()
    about = {"data": batches(), "model": model, "optimizer": optimizer}
    about |= {"steps": 5, "warmup": 1, "budget_s": 20.0} | options
    return fusedops.profile(trainer(model, optimizer), **about), model, optimizer


def test_measuring_threads_changes_their_number_and_puts_it_back():
    before, seen = torch.get_num_threads(), []
    fitting = int(usable_cpus())
    model, data = nn.Linear(8, 8), [torch.randn(4, 8)] * 20

    def step(batch):
        seen.append(torch.get_num_threads())
        model(batch)

    torch.set_num_threads(fitting + 2)
    try:
        report = fusedops.profile(step, data=data, model=model, steps=5, warmup=1)
        seen.clear()
        report.measure("threads", budget_s=60.0)
        assert set(seen) == {fitting, fitting + 2}
        assert seen.count(fitting) == seen.count(fitting + 2)
        assert torch.get_num_threads() == fitting + 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("change", ["patch", "adamw8bit", "fused_adamw", "bf16"])
def test_measuring_leaves_everything_as_it_was(change):
    report, model, optimizer = live()
    before = everything(model, optimizer)
    classes, kind = [type(m) for m in model.modules()], optimizer.step.__func__
    (tip,) = report.measure(change, budget_s=60.0)
    assert tip.id == change and tip.measured.interval[0] <= tip.measured.seconds
    assert tip.measured.seconds <= tip.measured.interval[1]
    assert same(before, everything(model, optimizer))
    assert [type(m) for m in model.modules()] == classes and optimizer.step.__func__ is kind
    assert tip in report.advice and f"{tip.title}" in str(report)


def test_measured_bytes_of_an_optimizer_are_its_states():
    """And torch's two temporaries of a parameter's size at the peak. The user's state is left."""
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    data = [torch.randn(8, 256)] * 20
    options = {"data": data, "model": model, "optimizer": optimizer, "steps": 5, "warmup": 1}
    report = fusedops.profile(trainer(model, optimizer), **options)
    (tip,) = report.measure("adamw8bit", budget_s=60.0)
    expected = tip.predicted.bytes + 2 * model.weight.nbytes
    assert tip.measured.bytes == pytest.approx(expected, rel=0.02)
    assert not optimizer.state
    (tip,) = report.measure("threads", budget_s=60.0)
    assert tip.measured.seconds is not None and tip.measured.bytes is None


def test_bytes_that_cannot_be_measured_are_none(monkeypatch):
    """The time counts all the same, and what was tried is undone."""
    report, model, optimizer = live()
    before = everything(model, optimizer)

    def broken(*args, **kwargs):
        raise RuntimeError("another profiler runs")

    monkeypatch.setattr(trial, "measure_memory", broken)
    (tip,) = report.measure("bf16", budget_s=60.0)
    assert tip.measured.seconds is not None and tip.measured.bytes is None
    assert same(before, everything(model, optimizer))


@pytest.mark.parametrize("name, kind", [("adamw8bit", AdamW8bit), ("fused_adamw", AdamW)])
def test_an_advised_optimizer_really_runs(name, kind):
    """Its state appears in the step that is measured, and is gone after it."""
    report, _, optimizer = live()
    with CHANGES[name].live(Target(optimizer=report._subject.optimizer)):
        assert type(optimizer.step.__self__) is kind
    assert optimizer.step.__self__ is optimizer


def fusable():
    return nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)), [torch.randn(64, 512)] * 9


def test_looking_for_sites_changes_nothing():
    model, data = fusable()
    state, classes = torch.get_rng_state(), [type(m) for m in model.modules()]
    options = {"data": data, "model": model, "steps": 5, "warmup": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fusedops.profile(lambda x: model(x).sum().backward(), **options)
    assert "patch" in {tip.id for tip in report.advice}
    assert torch.equal(state, torch.get_rng_state())
    assert [type(m) for m in model.modules()] == classes
    with fusedops.patched(model):
        report = fusedops.profile(lambda x: model(x).sum().backward(), **options)
    assert "patch" not in {tip.id for tip in report.advice}


def test_measure_within_a_profile():
    model, data = fusable()
    options = {"data": data, "model": model, "steps": 5, "warmup": 1, "budget_s": 20.0}
    report = fusedops.profile(lambda x: model(x).sum().backward(), measure=True, **options)
    measured = {tip.id for tip in report.advice if tip.measured}
    assert "patch" in measured and measured <= {*ALL_SAFE}


def test_what_cannot_be_measured():
    report, _, optimizer = live()
    with pytest.raises(ValueError, match="measure cannot try 'collate': it must be one of threads"):
        report.measure("collate")
    optimizer.step = optimizer.step
    with pytest.raises(ValueError, match="the optimizer's step was replaced"):
        report.measure("adamw8bit")
    loaded = Profile(report.evidence)
    with pytest.raises(RuntimeError, match=r"needs a report that fusedops\.profile made here"):
        loaded.measure("patch")


def test_a_step_that_a_change_breaks_keeps_the_report():
    model, data = nn.Linear(8, 8), [torch.randn(4, 8)] * 20
    before = model.weight.detach().clone()

    def step(batch):
        with torch.no_grad():
            model.weight.add_(1)
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no bfloat16 here")
        model(batch)

    report = fusedops.profile(step, data=data, model=model, steps=5, measure=True, budget_s=20.0)
    (tip,) = report.measure("bf16", budget_s=60.0)
    reason = "measuring bf16: the step raised ArithmeticError: no bfloat16 here"
    assert tip.measured is None and tip in report.advice
    assert reason in report.verdict.not_checked and reason in str(report)
    assert torch.equal(model.weight, before) and not torch.is_autocast_enabled("cpu")


def wrapped_by_a_scheduler(parameters):
    optimizer = torch.optim.AdamW(parameters)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    return optimizer


@pytest.mark.parametrize("make", [wrapped_by_a_scheduler, fusedops.optim.AdamW])
def test_measuring_leaves_out_what_it_cannot_try(make):
    """Moments of a large layer are most of the memory, so AdamW8bit is advised."""
    model = nn.Linear(256, 256)
    optimizer = make(model.parameters())
    options = {"data": [torch.randn(8, 256)] * 20, "model": model, "optimizer": optimizer}
    report = fusedops.profile(
        trainer(model, optimizer), measure=True, steps=5, budget_s=20.0, **options
    )
    (tip,) = [tip for tip in report.advice if tip.id == "adamw8bit"]
    assert tip.measured is None and tip.predicted.bytes > 0
    assert any(line.startswith("measuring adamw8bit: ") for line in report.verdict.not_checked)


def test_an_experiment_without_time_is_left_out():
    calls = []
    options = {"data": [torch.ones(4, 8)] * 20, "steps": 5, "warmup": 1}
    report = fusedops.profile(lambda batch: calls.append(batch + 1), **options)
    calls.clear()
    (tip,) = report.measure("bf16", budget_s=1e-6)
    assert tip.measured is None and calls == []
    reason = "measuring bf16: the budget had no time for it"
    (line,) = (line for line in report.verdict.not_checked if line.startswith(reason))
    assert re.search(r", it takes about \S+ \S+; budget_s=\d+ has time for all$", line)
    (tip,) = report.measure("bf16", budget_s=60.0)
    assert tip.measured is not None and line not in report.verdict.not_checked


def test_an_experiment_ends_when_a_change_is_too_slow():
    clock = Clock(1e-3)

    @contextmanager
    def stuck():
        clock.factor = 300.0
        yield
        clock.factor = 1.0

    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"the budget had time for \d+ of at least 12 rounds"):
        compare_blocks(clock.step, stuck, 0.2)
    assert time.perf_counter() - start < 6


def test_advice_survives_a_file(tmp_path):
    report, *_ = live()
    report.measure("adamw8bit", budget_s=60.0)
    report.save(tmp_path / "report.json")
    assert Profile.load(tmp_path / "report.json").advice == report.advice


class Clock:
    """A step that computes for a chosen time, twice as long under a change."""

    def __init__(self, seconds):
        self.seconds, self.factor = seconds, 1.0

    def step(self):
        end = time.thread_time() + self.seconds * self.factor
        while time.thread_time() < end:
            pass

    @contextmanager
    def slower(self):
        self.factor = 2.0
        yield
        self.factor = 1.0


def test_an_experiment_finds_a_slowdown():
    clock = Clock(4e-3)
    loss = saving(*compare_blocks(clock.step, clock.slower, 2.0))
    low, high = loss.interval
    assert low <= loss.seconds <= high < 0
    assert loss.seconds == pytest.approx(-4e-3, rel=0.5)
