"""A profile puts back all that its steps change: weights, gradients, generators, optimizer."""

import random

import numpy
import pytest
import torch
from torch import nn

import fusedops
from fusedops.measuring.snapshot import Snapshot
from profiling.cases import QUICK, batches, everything, same, trainer, workload

OPTIMIZERS = {
    "torch AdamW": (torch.optim.AdamW, {}),
    "torch SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "fusedops AdamW": (fusedops.optim.AdamW, {}),
    "fusedops AdamW8bit": (fusedops.optim.AdamW8bit, {"min_8bit_size": 0}),
}


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("torch AdamW", 0),
        ("torch SGD", 3),
        ("fusedops AdamW", 3),
        ("fusedops AdamW8bit", 0),
        ("fusedops AdamW8bit", 3),
    ],
)
def test_restore_is_bit_identical(name, trained):
    """Also the steps that follow are those of a run without a profile."""
    kind, options = OPTIMIZERS[name]
    data = batches()

    def run(profiled):
        model, optimizer = workload(kind, **options)
        step = trainer(model, optimizer)
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        for batch in data[:trained]:
            step(batch)
        before = everything(model, optimizer)
        if profiled:
            fusedops.profile(step, data=data, model=model, optimizer=optimizer, **QUICK)
        after = everything(model, optimizer)
        for batch in data[:3]:
            step(batch)
        return before, after, everything(model, optimizer)

    before, after, later = run(profiled=True)
    assert same(before, after)
    assert same(later, run(profiled=False)[2])


def test_gradients_are_put_back():
    model, optimizer = workload()
    model(torch.randn(8, 16)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    held = [g.clone() for g in grads]
    fusedops.profile(
        trainer(model, optimizer), data=batches(), model=model, optimizer=optimizer, **QUICK
    )
    for parameter, grad, value in zip(model.parameters(), grads, held, strict=True):
        assert parameter.grad is grad and torch.equal(grad, value)


def test_the_learning_rate_is_put_back():
    model, optimizer = workload()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(batch):
        trainer(model, optimizer)(batch)
        schedule.step()

    fusedops.profile(step, data=batches(), model=model, optimizer=optimizer, **QUICK)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_state_is_put_back_when_a_step_raises():
    (model, optimizer), data = workload(), batches()
    before, done = everything(model, optimizer), []

    def step(batch):
        done.append(batch)
        trainer(model, optimizer)(batch)
        if len(done) == 5:
            raise KeyError("labels")

    with pytest.raises(KeyError, match="labels") as raised:
        fusedops.profile(step, data=data, model=model, optimizer=optimizer, **QUICK)
    assert raised.value.__notes__ == ["fusedops.profile: raised by the step itself, in step 2"]
    assert same(before, everything(model, optimizer))


def test_without_restore_the_steps_count():
    model, optimizer = workload()
    before = everything(model, optimizer)
    fusedops.profile(
        trainer(model, optimizer),
        data=batches(),
        model=model,
        optimizer=optimizer,
        restore=False,
        **QUICK,
    )
    assert not same(before, everything(model, optimizer))


class Average(nn.Module):
    """Replaces a buffer in each forward, and makes another one in the first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        self.ema = self.ema * 0.9 + y.detach().mean(0)
        self.register_buffer("last", y.detach())
        return y


def test_a_replaced_buffer_is_put_back():
    model = Average()
    ema, weight = model.ema, model.linear.weight
    data = [torch.randn(3, 4) for _ in range(20)]
    fusedops.profile(lambda x: model(x).sum().backward(), data=data, model=model, **QUICK)
    assert model.ema is ema and torch.equal(ema, torch.zeros(4))
    assert [name for name, _ in model.named_buffers()] == ["ema"]
    assert model.linear.weight is weight and weight.grad is None


def test_tensors_in_tuples_of_the_optimizer_state_are_put_back():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = optimizer.state[parameter]
    state["pair"] = torch.ones(2), torch.full((2,), 2.0)
    state["history"] = [torch.zeros(2), 3]
    first = state["pair"][0]
    kept = Snapshot(None, optimizer)
    first.add_(5)
    state["history"].append(1)
    kept.restore()
    restored = optimizer.state[parameter]
    assert restored["pair"][0] is first
    assert same(restored["pair"], (torch.ones(2), torch.full((2,), 2.0)))
    assert same(restored["history"], [torch.zeros(2), 3])


class Counted(nn.Linear):
    """Counts its calls, and draws noise of a generator that it holds."""

    def __init__(self):
        super().__init__(16, 4)
        self.calls, self.random = 0, torch.Generator().manual_seed(3)

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * torch.rand(1, generator=self.random) + self.calls


def test_a_modules_numbers_and_generators_are_put_back():
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.random.get_state()
    fusedops.profile(
        trainer(model, optimizer), data=batches(), model=model, optimizer=optimizer, **QUICK
    )
    assert model.calls == 0 and torch.equal(model.random.get_state(), before)
