"""AdamW and clipping under torch.compile match eager, without recompiling or leaking."""

import copy
import gc

import pytest
import torch
from axes import grid
from torch import nn
from torch._dynamo.utils import counters

import fusedops
from adamw.training import FORMATS, equal_states, gradients, parameters, params_of, train
from fusedops.optim import AdamW, AdamW8bit


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def frames():
    """Returns how many frames Dynamo has compiled so far."""
    return counters["frames"]["total"]


def train_compiled(optimizer, call, steps=5, first=1):
    """Runs `adamw.training.train` with a compiled step."""
    for i in range(first, first + steps):
        gradients(params_of(optimizer), i)
        call()
    return optimizer


def ways(optimizer):
    return {
        "bound": torch.compile(optimizer.step),
        "function": torch.compile(lambda: optimizer.step()),
        "dynamic": torch.compile(optimizer.step, dynamic=True),
    }


OPTIONS = [{"state_dtype": name} for name in FORMATS]
OPTIONS += [{"max_grad_norm": 0.5}, {"lr": torch.tensor(1e-2)}, {"foreach": True}]


@grid(
    way=["bound", "function", "dynamic"],
    dtype=[torch.float32, torch.bfloat16, torch.float64],
    options=OPTIONS,
)
def test_a_compiled_step_has_the_bits_of_an_eager_one(options, dtype, way):
    ours, eager = AdamW(parameters(dtype), **options), AdamW(parameters(dtype), **options)
    train_compiled(ours, ways(ours)[way])
    train(eager)
    equal_states(ours, eager)
    assert frames()


def test_a_load_in_between_is_seen():
    ours, eager = AdamW8bit(parameters()), AdamW8bit(parameters())
    call = torch.compile(ours.step)
    train_compiled(ours, call, 3)
    train(eager, 3)
    for optimizer in (ours, eager):
        saved = copy.deepcopy(optimizer.state_dict())
        train(optimizer, 2, first=20)
        optimizer.load_state_dict(saved)
    train_compiled(ours, call, 3, first=4)
    train(eager, 3, first=4)
    equal_states(ours, eager)


def test_nothing_grows():
    """Compiled frames and live tensors stay constant while the learning rate changes."""
    optimizer = AdamW8bit(parameters(), max_grad_norm=1.0)
    call = torch.compile(optimizer.step)
    counted = []
    for i in range(60):
        optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
        train_compiled(optimizer, call, 1, first=i)
        if i in (5, 59):
            gc.collect()
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            counted.append((frames(), tensors))
    assert counted[0] == counted[1]


def test_clipping_is_a_part_of_the_graph():
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        gradients(params, 1)
    clip = torch.compile(lambda: fusedops.clip_grad_norm_(ours, 0.5), fullgraph=True)
    torch.testing.assert_close(clip(), nn.utils.clip_grad_norm_(theirs, 0.5))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
