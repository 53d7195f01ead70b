"""CUDA graphs by `graph_step` and `warm` without a GPU: arguments, memory, uncompiled kernels."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedops
from contract.cuda_graphs import NeverWaits
from contract.family import F16, as_tuple, each, on
from fusedops.graphs import Reads, Replayed, run
from fusedops.testing import backends
from fusedops.triton.quantized_linear import call as launch

ROOT = Path(__file__).parents[2]
FREED = r"graph_step: memory that the captured step uses was freed or moved \(float32 \["
NO_TABLE = r"the table of nf4's values is not on cpu yet, .*: call fusedops\.warm\(model, batch\)"


class Rerun:
    """CUDA's part without a GPU: a replay runs the step, and writes where its record wrote."""

    def warm(self, step):
        step()

    def record(self, step):
        self.step, self.wrote = step, step()
        return self.wrote

    def replay(self):
        loss = self.step().detach()
        with torch.no_grad():
            self.wrote.copy_(loss)


class Training:
    """A model, its optimizer, and a step that clears gradients as asked."""

    def __init__(self, set_to_none=True, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        self.set_to_none = set_to_none

    def step(self, batch):
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = (self.model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batches(n, size=5):
    draw = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(size, 4, generator=draw), "y": torch.randn(size, 3, generator=draw)}
        for _ in range(n)
    ]


def captured(training, *args):
    return Replayed(training.step, args or (batches(1)[0],), Rerun())


def test_on_a_cpu_the_step_is_returned_with_one_warning():
    training = Training()
    with pytest.warns(UserWarning, match="need a GPU, and this step is on cpu") as warned:
        step = fusedops.graph_step(training.step, *batches(1))
    assert step == training.step and len(warned) == 1 and warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*batches(1))


def test_an_example_on_two_devices():
    with pytest.raises(ValueError, match=r"must be on one device, got cpu, meta"):
        fusedops.graph_step(print, torch.ones(2), [torch.ones(2, device="meta")])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_replays_train_as_eager_steps(set_to_none):
    first, *rest = batches(4)
    training, eager = Training(set_to_none), Training(set_to_none)
    replayed = captured(training, first)
    for _ in range(4):  # Rerun's record runs the step too
        eager.step(first)
    outputs = [replayed(batch).clone() for batch in rest]
    assert torch.equal(torch.stack(outputs), torch.stack([eager.step(b) for b in rest]))
    assert torch.equal(training.model.weight, eager.model.weight)
    assert replayed(rest[0]) is replayed(rest[1])


def test_the_example_is_copied_and_not_written():
    (example, other), model = batches(2), nn.Linear(4, 3)
    kept = example["x"].clone()
    replayed = Replayed(lambda batch: model(batch["x"]).detach(), (example,), Rerun())
    assert torch.equal(replayed(other), model(other["x"]))
    assert torch.equal(example["x"], kept)


def test_arguments_must_be_as_the_examples():
    model = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    replayed = Replayed(lambda x, scale: (model(x) * scale).detach(), (x, 2.0), Rerun())
    replayed(x, 2.0)
    for args, said in [
        ((x[:3], 2.0), r"a tensor must be float32 \[5, 4\] as .*, got float32 \[3, 4\]"),
        ((x.double(), 2.0), r"got float64 \[5, 4\]"),
        ((x, 3.0), r"an argument that is no tensor must be 2\.0 as in the example, got 3\.0"),
        ((x, x), "must be 2.0"),
        ((x,), "arguments must be nested as"),
    ]:
        with pytest.raises(ValueError, match=f"graph_step: .*{said}"):
            replayed(*args)


def test_a_step_that_cannot_be_captured():
    class Refusing(Rerun):
        def record(self, step):
            raise RuntimeError("operation not permitted when stream is capturing")

    said = r"graph_step: the step cannot be captured: .*`\.item\(\)` .*: operation not permitted"
    with pytest.raises(RuntimeError, match=said):
        Replayed(torch.neg, (torch.ones(2),), Refusing())


def move_parameter(training):
    training.kept = training.model.weight.data
    training.model.weight.data = training.kept.clone()


def clear_gradients(training):
    training.model.weight.grad = None


def load_optimizer(training):
    state = training.optimizer.state_dict()
    training.optimizer.load_state_dict(json.loads(json.dumps(state, default=lambda t: t.tolist())))


CHANGES = [move_parameter, clear_gradients, load_optimizer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_replay_refuses_addresses_that_changed(change):
    training = Training(set_to_none=False)
    replayed = captured(training)
    replayed(*batches(1))
    change(training)
    with pytest.raises(RuntimeError, match=FREED):
        replayed(*batches(1))


def test_a_replay_accepts_changes_in_place():
    training = Training()
    replayed = captured(training)
    training.model.load_state_dict({k: v.clone() for k, v in training.model.state_dict().items()})
    training.model.weight.grad = None  # each step makes it
    training.optimizer.param_groups[0]["lr"] = 0.5
    replayed(*batches(1))


def test_what_a_step_makes_and_frees_is_not_noted():
    w = torch.randn(4, 4)
    with Reads() as reads:
        kept = (w @ w + 1).relu()
        kept.mul_(2)
    assert len(reads.read) == 1
    reads.forget_freed()
    del kept
    reads.check()
    del w
    with pytest.raises(RuntimeError, match="freed or moved"):
        reads.check()


class Noisy(nn.Module):
    """Its forward draws numbers, and changes a buffer and its mode."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls = []

    def forward(self, x):
        y = self.norm(torch.dropout(self.linear(x), 0.5, True))
        y.register_hook(self.calls.append) if y.requires_grad else self.calls.append(None)
        self.norm.eval()
        return y


@pytest.mark.parametrize("recorded", [True, False])
def test_warm_leaves_the_model_as_it_was(recorded):
    model = Noisy()
    model(torch.randn(6, 4)).sum().backward()
    model.norm.train()
    model.calls.clear()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradient, state = model.linear.weight.grad.clone(), torch.get_rng_state()
    with torch.set_grad_enabled(recorded):
        run(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert [g is not None for g in model.calls] == [recorded]  # the backward ran, or not
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.linear.weight.grad, gradient) and model.norm.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_kernel_that_is_not_compiled_ends_a_capture_with_advice():
    """Every kernel that the host launches, and of each the first launch."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    command = [sys.executable, "tests/children/capturing.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE)
    report = json.loads(done.stdout)
    assert len(report["launched"]) >= 14 and all(report["launched"].values())
    advice = re.compile(
        r"fusedops\.triton\.\S+_kernel is not compiled for these arguments, .*"
        r"call fusedops\.warm\(model, batch\) before the capture"
    )
    assert report["refusals"] and all(map(advice.fullmatch, report["refusals"]))
    assert set(report["compiled"]) == set(report["launched"])


def test_nf4s_table_is_not_made_in_a_capture(monkeypatch):
    device = torch.device("cpu")
    launch.nf4_table.cache_clear()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match=NO_TABLE):
        seem_to_capture(patched)
        launch.nf4_table(device)
    table = launch.nf4_table(device)
    seem_to_capture(monkeypatch)
    assert launch.nf4_table(device) is table


def seem_to_capture(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)


def _captured(family):
    for name, call in family.graphs.items():
        if "triton" in backends(call.operator):
            yield name, (call,)


@each("call", _captured)
def test_a_captured_call_reads_nothing_on_the_host(call):
    """test_cuda.py captures these calls; a value that the host reads would end that."""
    with on("triton"):
        run, leaves = call.on_leaves(call.function, call.args(dtype=F16, backend="triton"))
        leaves = [x.requires_grad_() for x in leaves]
        launch.nf4_table(leaves[0].device)  # once a process
        with NeverWaits():
            outputs = as_tuple(run(*leaves))
            grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
    assert all(t.isfinite().all() for t in (*outputs, *grads))
