"""The profiler's GPU measurements, from end to end, on a fake GPU (driver.py) without hardware."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusedops.__main__ import main
from fusedops.measuring.driver import Driver
from fusedops.profiling.collect.experiments import ProfiledStep, collect
from fusedops.profiling.collect.gpu.watched import traced
from fusedops.profiling.collect.kineto import steps_of
from fusedops.profiling.evidence import Evidence
from fusedops.profiling.judge import judge
from fusedops.profiling.report import Profile
from profiling.driver import Cuda, Profiler


def test_the_step_in_which_the_profiler_starts_is_not_in_the_trace():
    cuda, done = Cuda(), []
    driver = Driver(cuda=cuda, profile=Profiler, kind="cpu")
    events = traced(lambda: done.append(1), driver, lambda: done.append(cuda.synchronized))
    assert [step.name for step in steps_of(events)] == [f"ProfilerStep#{n}" for n in (1, 2, 3, 4)]
    assert cuda.synchronized == 5 and done == [1] * 5 + [4]  # before the last step's wait


@pytest.fixture(autouse=True)
def small_ceilings(tmp_path, monkeypatch):
    """Measured in an instant, and kept for one test."""
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path / "cache"))
    for name, value in {"TRIES_S": 0.01, "SIZES": (2**16, 2**20), "PRODUCT": 64}.items():
        monkeypatch.setattr(f"fusedops.profiling.collect.gpu.ceilings.{name}", value)


@pytest.fixture
def on_gpu():
    """What `fusedops.profile` finds of a training step, with its model and the driver."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    cuda = Cuda()

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cuda.tensors += 30
        cuda.wait()

    driver = Driver(cuda=cuda, profile=Profiler, kind="cpu")
    subject = ProfiledStep(step, [torch.randn(32, 64)] * 60, model, optimizer)
    evidence, call = collect(subject, 8, 2, 60.0, True, driver=driver)
    return SimpleNamespace(evidence=evidence, call=call, cuda=cuda, model=model, step=step)


def test_a_step_on_a_gpu_is_profiled_from_end_to_end(on_gpu):
    evidence, gpu = on_gpu.evidence, on_gpu.evidence.gpu
    assert evidence.device == "cuda" and evidence.about["device"] == "A GPU"
    assert len(evidence.plain.on_gpu) == len(evidence.plain.synced) == 8
    assert evidence.plain.preempted == ()  # the GPU works on
    assert 0 < gpu.busy <= 1 and gpu.kernels > 10 and gpu.reserved.slack == 300
    rows = {op.name: op for op in evidence.profiled.ops}
    products = [op for op in evidence.profiled.ops if op.name == "aten::addmm"]
    assert sum(op.flops for op in products) == 2 * 32 * (64 * 256 + 256 * 8)
    assert len(rows["aten::addmm"].seconds) == 4 and min(rows["aten::addmm"].seconds) > 0
    assert evidence.flops["float32"] == sum(op.flops for op in evidence.profiled.ops)
    assert [size for size, _ in evidence.ceilings.copy] == [2**16, 2**20]
    assert evidence.memory["parameters"] == sum(p.nbytes for p in on_gpu.model.parameters())
    assert evidence.memory["slack"] == 300
    assert any(line.startswith("clocks: ") for line in evidence.not_checked)
    assert not any(line.startswith(("GPU", "operators", "memory")) for line in evidence.not_checked)
    assert Evidence.from_dict(json.loads(json.dumps(evidence.to_dict()))) == evidence


def test_its_report_has_the_gpus_lines(on_gpu):
    report = Profile(on_gpu.evidence)
    shares = report.verdict.shares
    assert sum(middle for _, middle, _ in shares.values()) == pytest.approx(1)
    text = str(report)
    assert "GPU  busy" in text and "allocator: 100 B of 400 B in use" in text
    assert report.ops[0].seconds > 0 and report.time.mfu > 0


def test_the_steps_are_put_back_and_later_ones_wait_for_the_gpu(on_gpu):
    assert all(p.grad is None for p in on_gpu.model.parameters()) and on_gpu.cuda.mode == 0
    before = on_gpu.cuda.synchronized
    on_gpu.call()
    assert on_gpu.cuda.synchronized == before + 1


def test_every_experiment_ends_with_a_wait_for_the_gpu():
    class Busy(Cuda):
        busy = False

        def synchronize(self, index):
            super().synchronize(index)
            self.busy = False

    cuda, left, model = Busy(), [], nn.Linear(8, 8)

    def step():
        model(torch.ones(2, 8)).sum().backward()
        cuda.busy = True

    driver = Driver(cuda=cuda, profile=Profiler, kind="cpu")
    subject = ProfiledStep(step, model=model)
    collect(subject, 6, 1, 60.0, True, lambda: left.append(cuda.busy), driver)
    assert len(left) == 6 + 4 and not any(left)  # steps and experiments


def test_without_kernels_in_the_trace_there_is_no_verdict_on_the_gpu():
    """Of a machine without CUPTI."""
    model = nn.Linear(8, 8)
    driver = Driver(cuda=Cuda(), kind="cpu")
    subject = ProfiledStep(lambda: model(torch.ones(2, 8)).sum().backward(), model=model)
    evidence, _ = collect(subject, 6, 1, 60.0, True, driver=driver)
    assert evidence.gpu is None and evidence.profiled is None
    assert any("recorded no kernel" in line for line in evidence.not_checked)
    assert judge(evidence).bounds == ("unknown",)


def test_a_step_that_raises_under_a_collector_is_not_checked():
    model, cuda = nn.Linear(8, 8), Cuda()

    def step():
        model(torch.ones(2, 8)).sum().backward()
        if cuda.mode:
            raise RuntimeError("no warnings here")

    driver = Driver(cuda=cuda, profile=Profiler, kind="cpu")
    evidence, _ = collect(ProfiledStep(step, model=model), 6, 1, 60.0, True, driver=driver)
    assert "lines that wait: a step raised RuntimeError: no warnings here" in evidence.not_checked
    assert evidence.gpu is not None and evidence.profiled is not None and cuda.mode == 0


def test_a_step_that_allocates_nothing_on_the_gpu_is_the_cpus():
    """The program uses CUDA elsewhere."""
    driver = Driver(cuda=Cuda())
    subject = ProfiledStep(lambda: torch.ones(64, 64) @ torch.ones(64, 64))
    evidence, _ = collect(subject, 6, 1, 60.0, True, driver=driver)
    assert evidence.gpu is None and evidence.profiled is not None and evidence.device == "cpu"
    assert "GPU: none was used" in evidence.not_checked


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_needs_the_device_that_it_is_given(capsys):
    assert main(["profile", "--model", "llama", "--device", "cuda"]) == 1
    message = "fusedops profile: device must be one that torch finds, got cuda\n"
    assert capsys.readouterr().err == message
