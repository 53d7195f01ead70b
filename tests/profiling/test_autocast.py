"""The profiler's prediction of what bf16 autocast would save, from timed calls to the advice."""

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.collect import autocast
from fusedops.profiling.collect.autocast import time_autocast
from fusedops.profiling.evidence import Autocast, Evidence, SiteTime
from fusedops.profiling.judge import judge
from profiling.cases import everything, same
from profiling.synthetic import CEILINGS, MS, matmul, step


def timed(call, seconds=0.0):
    """Few rounds by default, which is enough for what is counted, of all calls.

    On a busy machine one slow moment can make a call's share of the time too small to be measured.
    """
    with mock.patch.object(autocast, "MATTER", 1.1):
        times, reason = time_autocast(call, perf_counter() + seconds)
    assert not reason
    return times


def calls(times):
    counts = Counter()
    for call in times.timed:
        counts[call.kind] += call.calls
    return counts


class Chain(nn.Module):
    """Linears with a layer norm before and an activation between them."""

    def __init__(self, width=64, linears=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(linears))

    def forward(self, x):
        x = self.norm(x)
        for linear in self.linears:
            x = F.gelu(linear(x))
        return x


def test_calls_whose_dtypes_change_are_timed():
    """The first linear gets a float32 input, the others what a linear in bfloat16 gave."""
    model, x = Chain(), torch.randn(32, 64)
    times = timed(lambda: model(x).sum().backward())
    counts = sorted(call.calls for call in times.timed if call.kind == "linear")
    assert counts == [1, 2] and calls(times)["gelu"] == 3 and times.left == 0
    assert "layer_norm" not in calls(times)
    shapes = {call.shapes for call in times.timed if call.kind == "linear"}
    assert shapes == {"[32, 64] [64, 64]"}
    assert all(min(*call.before, *call.after) > 0 for call in times.timed)


class Products(TorchDispatchMode):
    """Counts products by dtype, and casts by shape and dtype."""

    def __init__(self):
        super().__init__()
        self.products, self.casts = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.products[out.dtype] += 1
        if func is torch.ops.aten._to_copy.default and out.shape == (64, 64):
            self.casts[out.dtype] += 1
        return out


def test_a_call_in_autocast_casts_its_weight_and_its_gradient():
    """As in the step itself: without the casts, small products would seem to gain too much."""
    model, x = Chain(linears=1), torch.randn(32, 64)
    with Products() as seen:
        timed(lambda: model(x).sum().backward())
    in_autocast = seen.products[torch.bfloat16] // 3  # forward, and two products backward
    assert in_autocast > 4 and seen.products[torch.float32] > 3 * 4
    assert seen.casts == {torch.bfloat16: in_autocast, torch.float32: in_autocast}


def test_the_seconds_are_those_of_each_mode():
    """A function that takes 30 ms longer in autocast."""
    real = torch.ops.aten.gelu.default

    class Slow(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is real and args[0].dtype == torch.bfloat16:
                end = time.thread_time() + 30 * MS
                while time.thread_time() < end:
                    pass
            return func(*args, **(kwargs or {}))

    model, x = Chain(), torch.randn(32, 64)
    with Slow():
        times = timed(lambda: model(x).sum().backward())
    (gelu,) = [entry for entry in times.timed if entry.kind == "gelu"]
    assert 29 * MS < min(gelu.after) - min(gelu.before) < 90 * MS and gelu.calls == 3
    evidence = replace(step(matmul(40 * MS)), autocast=Autocast((gelu,)))
    assert not [entry for entry in advise(evidence, judge(evidence)) if entry.id == "bf16"]


def test_a_step_is_run_twice_and_nothing_of_it_is_repeated():
    """Not what it writes, and not its optimizer's operations."""

    def trained(steps):
        torch.manual_seed(0)
        model, x = Chain(), torch.randn(32, 64)
        model.register_buffer("count", torch.zeros(()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def call():
            y = model(x)
            model.count.add_(y.detach().sum())
            model.count += y.detach().sum()
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        call()  # makes the momentum, so that all later steps call the same functions
        steps(call)
        return everything(model, optimizer)

    def twice(call):
        call()
        with torch.autocast("cpu", torch.bfloat16):
            call()

    assert same(trained(timed), trained(twice))


def test_a_teachers_calls_are_timed_too():
    model, x = Chain(), torch.randn(32, 64)

    def distil():
        with torch.no_grad():
            teacher_out = model(x)
        (model(x) - teacher_out).square().sum().backward()

    assert calls(timed(distil))["linear"] == 6


def test_kept_bytes_are_exact():
    """In autocast: the input's cast, the sum before gelu, its result, and a copy of a weight."""
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
    x = torch.randn(4, 16)
    times = timed(lambda: model(x).sum().backward())
    assert times.kept == (4 * (16 + 32 + 32) * 4, (4 * (16 + 32 + 32) + 8 * 32) * 2)


def test_kept_bytes_are_those_of_one_of_two_accumulated_forwards():
    model = nn.Linear(16, 8, bias=False)
    inputs = torch.randn(4, 16), torch.randn(4, 16)

    def call():
        for x in inputs:
            model(x).sum().backward()

    assert timed(call).kept == (4 * 16 * 4, 4 * 16 * 2)


def test_a_step_without_gradients():
    model, x = Chain(), torch.randn(32, 64)

    def forward():
        with torch.no_grad():
            model(x)

    times = timed(forward)
    assert calls(times)["linear"] == 3 and times.kept == (0, 0)


def test_a_patched_models_sites_are_calls_too():
    model, x = Chain(width=512), torch.randn(256, 512)
    with fusedops.patched(model) as report:
        times = timed(lambda: model(x).sum().backward())
        sites = {kind: n for kind, (n, _) in report.coverage.items() if n}
    assert sites["linear"] == 3 and calls(times)["linear"] == 3
    assert calls(times)["norm"] == sites["norm"] == 1


def test_why_nothing_was_timed():
    def breaks():
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no bfloat16 here")

    result = time_autocast(breaks, perf_counter())
    assert result == (None, "a step in autocast raised ArithmeticError: no bfloat16 here")


def test_steps_that_differ_are_left_out():
    """The functions whose calls have other shapes in autocast."""
    model, x = Chain(), torch.randn(32, 64)

    def call():
        model(x[:16] if torch.is_autocast_enabled("cpu") else x).sum().backward()

    times = timed(call)
    assert times.left >= 6 and not {"linear", "gelu"} & set(calls(times))


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """A machine whose bfloat16 products are twice as fast."""
    from fusedops.profiling.collect import measurements

    monkeypatch.setattr(measurements, "ceilings", lambda dtypes: CEILINGS)


@pytest.mark.parametrize("restore", [True, False])
def test_steps_in_autocast_are_undone(fast_bfloat16, restore):
    """With restore=False other steps are real ones, and a weight counts them."""
    model, taken = Chain(), []

    def train(x):
        with torch.no_grad():
            model.norm.bias.add_(1)
        model(x).sum().backward()
        taken.append(torch.is_autocast_enabled("cpu"))

    options = {"data": [torch.randn(32, 64)] * 20, "model": model, "steps": 5, "warmup": 1}
    before = everything(model, torch.optim.SGD(model.parameters()))
    report = fusedops.profile(train, **options, restore=restore, budget_s=30.0)
    assert report.evidence.autocast.timed and taken.count(True) == 1
    if restore:
        assert same(before, everything(model, torch.optim.SGD(model.parameters())))
    else:  # one is patched, one in autocast, and one as it is beside that
        assert torch.equal(model.norm.bias, torch.full((64,), float(len(taken) - 3)))


def test_the_report_says_why_there_is_no_prediction(fast_bfloat16):
    model = Chain()

    def train(x):
        if torch.is_autocast_enabled("cpu"):
            raise ArithmeticError("no bfloat16 here")
        model(x).sum().backward()

    options = {"data": [torch.randn(32, 64)] * 20, "model": model, "steps": 5, "warmup": 1}
    report = fusedops.profile(train, **options, budget_s=30.0)
    reason = "saving of bf16: a step in autocast raised ArithmeticError: no bfloat16 here"
    assert report.evidence.autocast is None and reason in report.verdict.not_checked


def test_a_cpu_without_fast_bfloat16_says_so(monkeypatch):
    from fusedops.profiling.collect import measurements

    slow = replace(CEILINGS, flops={"float32": 100e9, "bfloat16": 90e9})
    monkeypatch.setattr(measurements, "ceilings", lambda dtypes: slow)
    model = Chain()
    options = {"data": [torch.randn(32, 64)] * 20, "model": model, "steps": 5, "warmup": 1}
    report = fusedops.profile(lambda x: model(x).sum().backward(), **options, budget_s=30.0)
    reason = "bf16: not here, bfloat16 products are no faster than float32 ones on this CPU"
    assert report.evidence.autocast is None and reason in report.verdict.not_checked


# The advice is a function of the evidence.


def call_time(kind, calls, before, after):
    """One of the pairs of blocks was disturbed."""
    return SiteTime(kind, kind, "[8, 8]", calls, (before,) * 5 + (9.0,), (after,) * 6)


def bf16(times, evidence=None):
    evidence = replace(evidence or step(matmul(40 * MS)), autocast=times)
    return [entry for entry in advise(evidence, judge(evidence)) if entry.id == "bf16"]


def test_the_sum_over_calls():
    """A function that is slower in bfloat16 takes off what the products save."""
    times = call_time("linear", 4, 3 * MS, 1 * MS), call_time("softmax", 2, 1 * MS, 2 * MS)
    (tip,) = bf16(Autocast(times, kept=(2**22, 2**21)))
    assert tip.predicted.seconds == pytest.approx(6 * MS) and tip.predicted.bytes == 2**21
    assert "In autocast: linear -8 ms, softmax +2 ms" in tip.why and "casts" in tip.formula
    assert "not compared" not in tip.why
    (tip,) = bf16(Autocast(times, left=3))
    assert tip.why.endswith("softmax +2 ms; 3 calls were not compared")


def test_what_gets_slower_is_not_advised():
    assert bf16(Autocast((call_time("linear", 4, 1 * MS, 3 * MS),))) == []


def test_without_times_the_prediction_is_rough():
    """Of the time at float32's peak, what bfloat16's saves, less the casts' bytes and calls."""
    (tip,) = bf16(None)
    evidence = step(matmul(40 * MS))
    (op,), ceilings = evidence.profiled.ops, evidence.ceilings
    seconds = op.flops / ceilings.flops["float32"] - op.flops / ceilings.flops["bfloat16"]
    seconds -= op.bytes / ceilings.copy[-1][1] + 3 * op.calls * ceilings.op_seconds
    assert tip.predicted.seconds == pytest.approx(seconds) and "float32's peak" in tip.formula


def test_bf16_needs_a_cpu_that_is_faster_with_it():
    evidence = step(matmul(10 * MS))
    slow = replace(evidence.ceilings, flops={"float32": 100e9, "bfloat16": 90e9})
    assert bf16(None, replace(evidence, ceilings=slow)) == []


def test_saved_evidence_gives_the_same_advice(tmp_path):
    times = Autocast((call_time("linear", 4, 3 * MS, 1 * MS),), (9, 5), 3)
    evidence = replace(step(matmul(40 * MS)), autocast=times)
    evidence.save(tmp_path / "evidence.json")
    loaded = Evidence.load(tmp_path / "evidence.json")
    assert loaded == evidence
    assert advise(loaded, judge(loaded)) == advise(evidence, judge(evidence))


def test_evidence_from_before_these_fields_loads():
    line = (Path(__file__).parent / "recorded" / "compute.jsonl").read_text().splitlines()[0]
    old = json.loads(line)["evidence"]
    assert not {"autocast", "optimizers"} & set(old)
    loaded = Evidence.from_dict(old)
    assert loaded.autocast is None and loaded.optimizers is None
