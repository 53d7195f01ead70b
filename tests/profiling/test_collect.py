"""fusedops.profile on small models: its measurements, time budget, notes and argument errors."""

import os
import re
import time
from collections import UserDict, namedtuple
from dataclasses import replace

import pytest
import torch
from torch import nn

import fusedops
from fusedops.measuring.clock import throttled_seconds, withheld
from fusedops.profiling.collect import ceilings as ceilings_module
from fusedops.profiling.collect import data as data_module
from fusedops.profiling.collect import series
from fusedops.profiling.collect.about import about
from fusedops.profiling.collect.arithmetic import Arithmetic
from fusedops.profiling.collect.batches import batch_size, count_tokens, halve, nbytes
from fusedops.profiling.collect.ceilings import ceilings
from fusedops.profiling.collect.series import Phases, Series
from fusedops.profiling.collect.steps import StepsPlan
from fusedops.profiling.evidence import Tokens
from fusedops.profiling.report import Profile
from fusedops.profiling.show.text import NAMES
from profiling.cases import QUICK, batches, everything, same, trainer, workload


def test_measuring_the_machine_leaves_the_generators(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path))
    state = torch.get_rng_state()
    limits = ceilings(["float32"])
    assert torch.equal(state, torch.get_rng_state())
    assert ceilings(["float32"]) == limits  # from the file
    assert [size for size, _ in limits.copy] == sorted(size for size, _ in limits.copy)
    assert min(limits.op_seconds, limits.fault_seconds, *limits.flops.values()) > 0
    more = ceilings(["bfloat16"])  # only its product is measured
    assert more == replace(limits, flops=limits.flops | {"bfloat16": more.flops["bfloat16"]})


def test_ceilings_have_no_threads_that_wait_for_a_cpu(monkeypatch):
    threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(ceilings_module, "usable_cpus", lambda: 2.0)
    monkeypatch.setattr(
        ceilings_module, "kept_ceilings", lambda *_: seen.append(torch.get_num_threads())
    )
    try:
        for count in (8, 1):
            torch.set_num_threads(count)
            ceilings(["float32"])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert seen == [2, 1]


def test_ceilings_are_work_by_seconds(monkeypatch):
    monkeypatch.setattr(ceilings_module, "_best", lambda call, *_: 2.0)
    assert ceilings_module._product(torch.float32) == ceilings_module.PRODUCT**3
    assert ceilings_module._copy(2**20) == 2**19


def test_the_wait_for_a_batch_is_part_of_a_step():
    series = Series(Phases(None))
    series.time(lambda batch: time.sleep(batch), lambda: time.sleep(0.02) or 0.01)
    assert series.wait[0] >= 0.02 and series.seconds[0] >= series.wait[0] + 0.01


def profiled(step=None, **options):
    model, optimizer = workload()
    about = {"data": batches(), "model": model, "optimizer": optimizer} | QUICK | options
    return fusedops.profile(step or trainer(model, optimizer), **about)


def test_every_experiment_runs():
    report = profiled()
    runs = report.evidence
    assert len(runs.plain.seconds) == len(runs.cached.seconds) == len(runs.half.seconds) == 5
    assert runs.profiled and runs.ceilings and runs.loader.batches_per_s > 0
    assert runs.tokens.samples == 8
    assert all(0 <= w <= s for w, s in zip(runs.plain.wait, runs.plain.seconds, strict=True))
    assert all(o > 0 for o in runs.plain.optimizer) and all(f > 0 for f in runs.plain.forward)
    assert sum(middle for _, middle, _ in report.verdict.shares.values()) == pytest.approx(1)


def test_memory_is_equal_to_the_byte():
    """Two linear layers and a batch norm, with AdamW's two moments and its step numbers."""
    report, model = profiled(), workload()[0]
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    sizes = report.memory
    assert sizes["parameters"] == sizes["gradients"] == parameters and sizes["buffers"] == buffers
    steps = 4 * len(list(model.parameters()))
    assert sizes["optimizer_state"] == 2 * parameters + steps
    assert sizes["peak"] >= 4 * parameters + buffers and "peak" in str(report)
    assert profiled(budget_s=1e-6).memory is None


def test_the_modules_that_save_most_are_named():
    model = nn.Sequential(*(nn.Linear(n, n + 1) for n in range(16, 28)))
    report = fusedops.profile(lambda x: model(x).sum().backward(), data=batches(), model=model)
    largest = [f"{layer}" for layer in range(11, 1, -1)]
    assert [*report.evidence.activations] == largest


def test_operators_have_the_arithmetic_of_the_step():
    """Two linear layers: three products each, but the first needs no gradient of its input.

    They are wide, as products of a few microseconds are no longer than the profiler's own cost.
    """
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    data = [torch.randn(64, 256) for _ in range(40)]
    about = {"data": data, "model": model, "optimizer": optimizer}
    report = fusedops.profile(trainer(model, optimizer), **about, **QUICK)
    products = 2 * 64 * 256 * 256 * 2 + 2 * 64 * 256 * 128 * 3
    assert sum(op.flops for op in report.ops) == products == report.time.flops
    assert {op.module for op in report.ops if op.flops} == {"*"}  # the model has numbers only
    assert all(op.seconds > 0 for op in report.ops if op.flops)


def test_a_saved_report_is_the_same(tmp_path):
    report = profiled()
    report.save(tmp_path / "report.json")
    loaded = Profile.load(tmp_path / "report.json")
    assert loaded.to_dict() == report.to_dict()
    here = re.sub(
        r"\n +report\.measure\([^)]*\) tries them here and\s+undoes them", "", str(report)
    )
    assert str(loaded) == here
    with pytest.raises(RuntimeError, match=r"needs a report that fusedops\.profile made"):
        loaded.trace(tmp_path / "trace.json")


def test_a_trace_leaves_no_trace_in_the_model(tmp_path):
    model, optimizer = workload()
    report = profiled(trainer(model, optimizer), model=model, optimizer=optimizer)
    before = everything(model, optimizer)
    size = report.trace(tmp_path / "trace.json")
    assert size == (tmp_path / "trace.json").stat().st_size > 1000
    assert "aten::addmm" in (tmp_path / "trace.json").read_text()
    assert same(before, everything(model, optimizer))


def test_print_shows_the_verdict_and_every_share():
    report = profiled()
    shown = str(report)
    assert "VERDICT" in shown and "aten::" in shown and "not checked" in shown
    shares = {bound: share for bound, share in report.verdict.shares.items() if share[1] >= 0.005}
    assert len(shares) >= 2
    for bound, (low, middle, high) in shares.items():
        percent = f"{100 * middle:.0f} % ({100 * low:.0f}..{100 * high:.0f})"
        row = re.escape(f"  {NAMES[bound]:31}{percent:>18}")
        assert re.search(rf"{row} +(\d+ %)?  █", shown)
    assert max(map(len, shown.splitlines())) <= 100


def test_without_data_the_input_is_not_checked():
    model, optimizer = workload()
    batch = torch.randn(8, 16)
    report = fusedops.profile(lambda: trainer(model, optimizer)(batch), tokens=8, **QUICK)
    notes = "\n".join(report.verdict.not_checked)
    assert "input: no data was given" in notes and "elasticity: no data was given" in notes
    assert "restore: no model and no optimizer were given" in notes
    assert report.verdict.shares["input"] == (0, 0, 0) and report.time.tokens_per_s > 0


def test_data_that_ends_early():
    report = profiled(data=iter(batches(3)))
    assert report.verdict.bounds == ("unknown",)
    assert "the data ended after 2 measured steps" in report.verdict.not_checked
    assert any("needs 5 steps" in line for line in report.verdict.evidence)


def test_data_that_ends_in_the_warm_up():
    """Steps on the kept batches are timed instead."""
    report = profiled(data=batches(1), warmup=3, steps=6)
    runs = report.evidence
    assert len(runs.plain.seconds) == 6 and runs.cached is None
    assert "input: the data ended in the warm-up" in report.verdict.not_checked
    assert report.verdict.shares["input"] == (0, 0, 0) and runs.tokens.samples == 8
    assert profiled(data=batches(1), warmup=3, budget_s=1e-6).verdict.bounds == ("unknown",)


def test_a_short_last_batch_does_not_stand_for_the_others():
    """The table of operators and the arithmetic are those of a batch of the usual size."""
    report = profiled(data=[*batches(5), *batches(1, size=2)], steps=6, warmup=0)
    assert report.time.flops == 2 * 8 * 16 * 32 * 2 + 2 * 8 * 32 * 4 * 3
    assert report.evidence.tokens.samples == 7  # (5 x 8 + 2) / 6


def test_tokens_are_the_mean_of_the_measured_steps():
    lengths = [100, 10] * 4
    data = [{"input_ids": torch.zeros(4, n, dtype=torch.long)} for n in lengths]
    model = nn.Embedding(10, 8)

    def step(batch):
        model(batch["input_ids"]).sum().backward()

    for warmup, steps in ((1, 6), (2, 6)):
        report = fusedops.profile(step, data=data, model=model, warmup=warmup, steps=steps)
        assert report.evidence.tokens.real == 4 * 55


def test_a_batch_without_a_batch_dimension():
    model, optimizer = workload()

    def step(scale):
        trainer(model, optimizer)(torch.ones(8, 16) * scale)

    report = fusedops.profile(step, data=[torch.tensor(2.0)] * 20, **QUICK)
    assert report.evidence.half is None
    assert "elasticity: no half of the batch: its tensors share no dimension 0" in (
        report.verdict.not_checked
    )


def test_a_step_that_needs_the_whole_batch():
    model, optimizer = workload()

    def step(batch):
        assert len(batch) == 8, "eight samples"
        trainer(model, optimizer)(batch)

    report = profiled(step)
    assert report.evidence.half is None
    assert any("AssertionError: eight samples" in line for line in report.verdict.not_checked)


def test_a_model_on_two_devices():
    model, optimizer = workload()
    both = nn.ModuleList([model, nn.Linear(4, 4, device="meta")])
    report = profiled(trainer(model, optimizer), model=both, restore=False)
    assert report.evidence.profiled is None
    assert "operators: the model is on 2 devices, cpu, meta" in report.verdict.not_checked


def test_a_model_on_another_device_has_no_table():
    model = nn.Linear(4, 4, device="meta")
    data = [torch.randn(3, 4, device="meta")] * 20
    report = fusedops.profile(model, data=data, model=model, **QUICK)
    assert report.evidence.profiled is None and report.evidence.device == "meta"
    notes = report.verdict.not_checked
    assert "operators: the model is on meta, and only those of CPUs and CUDA are recorded" in notes
    assert "memory: the model is on meta, and only that of CPUs and CUDA is measured" in notes
    assert profiled().evidence.device == "cpu"
    assert "GPU: none was used" in profiled().verdict.not_checked


def test_a_short_budget_goes_to_the_steps_that_a_verdict_needs():
    """Eleven steps' time: with three warm-up steps, kept batches and halves it gave only four."""
    model = nn.Linear(16, 4)

    def step(batch):
        time.sleep(0.3)
        model(batch)

    report = fusedops.profile(step, data=batches(20), model=model, warmup=3, budget_s=3.3)
    assert len(report.evidence.plain.seconds) >= 5
    assert not any("needs 5 steps" in line for line in report.verdict.evidence)
    assert any("steps of kept batches" in line for line in report.verdict.not_checked)


def test_fewer_than_five_steps_on_kept_batches_are_not_compared(monkeypatch):
    """The wait for data then says what the input takes, and the report that nothing else does."""
    model, optimizer = workload()
    train, seen, again = trainer(model, optimizer), set(), []

    def step(batch):
        if batch.data_ptr() in seen and len(batch) == 8:
            again.append(batch)
        seen.add(batch.data_ptr())
        train(batch)

    def has_time_for(plan, seconds):
        return seconds == 0 or len(again) < 4

    monkeypatch.setattr(StepsPlan, "has_time_for", has_time_for)
    report = profiled(step, model=model, optimizer=optimizer, budget_s=60.0)
    assert len(report.evidence.plain.seconds) >= 5 and report.evidence.cached is None
    reason = "input: the budget had no time for steps of kept batches"
    assert reason in report.verdict.not_checked


def test_steps_that_are_too_few_for_kept_batches_are_named():
    report = profiled(steps=4, budget_s=60.0)
    assert "input: 4 steps are too few, it needs 5" in report.verdict.not_checked
    assert "elasticity: 4 steps are too few, it needs 5" in report.verdict.not_checked


def test_a_budget_of_one_step():
    report = profiled(budget_s=1e-6)
    assert report.verdict.bounds == ("unknown",)
    assert "operators: the budget had no time for it" in report.verdict.not_checked


WRONG = {
    "step": (TypeError, "step must be a function, got int", {"step": 3}),
    "model": (TypeError, r"model must be a torch.nn.Module or None, got str", {"model": "gpt2"}),
    "optimizer": (TypeError, "optimizer must be a torch.optim.Optimizer", {"optimizer": 1}),
    "tokens": (
        TypeError,
        "tokens must be an integer, a function or None, got str",
        {"tokens": "x"},
    ),
    "negative tokens": (ValueError, "tokens must be at least 0, got -1", {"tokens": -1}),
    "tokens without data": (
        ValueError,
        "tokens must be an integer without data, got a function",
        {"tokens": len, "data": None},
    ),
    "data": (TypeError, "data must be an iterable of batches, got int", {"data": 5}),
    "a batch": (
        TypeError,
        "data must be an iterable of batches, got dict",
        {"data": {"x": torch.ones(2)}},
    ),
    "no batch": (ValueError, "data must have at least one batch, got none", {"data": []}),
    "text": (TypeError, "data must be an iterable of batches, got str", {"data": "train"}),
    "lazy": (
        ValueError,
        "model must have initialized parameters, got lazy ones in LazyLinear",
        {"model": nn.LazyLinear(3)},
    ),
    "steps": (ValueError, "steps must be an integer of at least 1, got 0", {"steps": 0}),
    "warmup": (ValueError, "warmup must be an integer of at least 0, got -1", {"warmup": -1}),
    "budget": (ValueError, "budget_s must be more than 0 seconds, got 0", {"budget_s": 0}),
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments(argument):
    kind, message, options = WRONG[argument]
    with pytest.raises(kind, match=f"profile: {message}"):
        profiled(**options)


Pair = namedtuple("Pair", "x y")


def test_halves_of_batches():
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    assert batch_size({"x": x, "y": y, "scale": torch.tensor(2.0)}) == 4
    half = halve({"x": x, "pair": Pair(x, [y, 3]), "texts": ["a", "b", "c", "d"], "n": 4})
    assert torch.equal(half["x"], x[:2]) and torch.equal(half["pair"].y[0], y[:2])
    assert half["texts"] == ["a", "b"] and half["n"] == 4 and isinstance(half["pair"], Pair)
    assert isinstance(halve(UserDict(x=x)), UserDict)
    assert nbytes([x, {"y": y}]) == x.nbytes + y.nbytes
    for wrong, message in ((torch.ones(1, 3), "one sample"), ([x, torch.ones(3)], "share no")):
        with pytest.raises(ValueError, match=message):
            halve(wrong)


def test_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert count_tokens({"input_ids": ids, "attention_mask": mask}, None).real == 3
    assert count_tokens({"input_ids": ids, "attention_mask": mask}, None).padded == 6
    assert count_tokens({"input_ids": ids, "labels": torch.full((2, 3), -100)}, None).real == 0
    assert count_tokens({"input_ids": ids}, None).real == 6
    assert count_tokens(ids, lambda batch: 5).real == 5
    assert count_tokens(ids, None).real is None and count_tokens(ids, None).samples == 2
    pair = {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}
    assert count_tokens(pair, None) == Tokens(real=3 + 6, padded=6 + 6, samples=2)
    assert count_tokens((list(pair), torch.ones(2)), None) == count_tokens(pair, None)
    assert count_tokens([*pair, {"pixels": ids}], None) == Tokens(samples=2)


def test_products_that_work_in_place_have_their_flops():
    x, sums = torch.randn(2, 3, 4), torch.zeros(2, 3, 3)
    with Arithmetic() as counted:
        sums[0].addmm_(x[0], x[0].T)
        sums.baddbmm_(x, x.mT)
    assert counted.flops == {"float32": (1 + 2) * 2 * 3 * 3 * 4}


def test_only_weights_that_can_be_quantized_count_as_frozen():
    """An embedding, a trained layer and one that is quantized already do not."""
    model = nn.ModuleDict({n: nn.Linear(64, 64, bias=False) for n in ("frozen", "trained", "nf4")})
    model["embedding"] = nn.Embedding(1000, 64)
    model.requires_grad_(False)["trained"].requires_grad_(True)
    facts = about(model)
    assert facts["frozen_bytes"] == 4 * facts["frozen_elements"] == 2 * 4 * 64 * 64
    model["nf4"] = fusedops.nn.QuantizedLinear.from_linear(model["nf4"], "nf4")
    assert about(model)["frozen_bytes"] == 4 * 64 * 64


def test_kept_batches_are_limited(monkeypatch):
    monkeypatch.setattr(data_module, "KEPT_BYTES", 3 * 8 * 16 * 4)
    data = data_module.Data(batches(10))
    for _ in range(10):
        data.keep(data.next())
    assert len(data.kept) == 3
    with pytest.raises(StopIteration):
        data.next()
    assert data.ended
    monkeypatch.setattr(data_module, "KEPT_BYTES", 10)
    with pytest.raises(ValueError, match="a batch must have at most"):
        profiled()


def test_counters_of_the_system(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    stat = "usage_usec 10\nnr_throttled 2\nthrottled_usec 1500000\n"
    (tmp_path / "sys/fs/cgroup/job/cpu.stat").write_text(stat)
    (tmp_path / "proc/stat").write_text("cpu  10 0 10 70 0 0 0 10 0 0\ncpu0 1\n")
    assert throttled_seconds(tmp_path) == 1.5
    assert withheld(tmp_path) == (10, 100)
    assert throttled_seconds(tmp_path / "none") == 0 and withheld(tmp_path / "none") == (0, 0)


def test_what_was_withheld_is_a_share_of_the_time_since(monkeypatch):
    ticks, throttled, now = iter([(10, 100), (30, 200)]), iter([1.0, 1.5]), iter([7.0, 9.0])
    monkeypatch.setattr(series, "withheld", lambda: next(ticks))
    monkeypatch.setattr(series, "throttled_seconds", lambda: next(throttled))
    monkeypatch.setattr(series, "perf_counter", lambda: next(now))
    assert series.Withheld().shares() == (0.25, 0.2)


def test_a_slow_function_of_the_loader_is_named(monkeypatch):
    """With its path from the working directory on, if it is below that."""

    def collate(samples):
        time.sleep(0.02)
        return torch.stack(samples)

    def slowest():
        loader = torch.utils.data.DataLoader(batches(), 2, collate_fn=collate)
        (name,) = data_module.Data(loader).alone(0.5).functions
        return name.rpartition(":")[0]

    folder = os.path.dirname(__file__)
    assert slowest() == f"collate ({os.path.relpath(__file__)}"
    monkeypatch.chdir(folder)
    assert slowest() == "collate (test_collect.py"
