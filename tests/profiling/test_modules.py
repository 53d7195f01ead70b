"""Operators have the name of the module that they belong to, also in the backward."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedops.profiling.collect.modules import Modules
from fusedops.profiling.collect.operators import Recorder

WIDTHS = {"first": 16, "second.inner": 24, "third": 8}  # every layer's products have own shapes


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 24, bias=False)
        self.dropout_with_a_long_name = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout_with_a_long_name(self.inner(x))


class Model(nn.Module):
    def __init__(self, how=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 16, bias=False), Inner()
        self.third, self.how = nn.Linear(24, 8, bias=False), how

    def forward(self, x):
        x = self.first(x)
        x = self.second(x) if self.how is None else checkpoint(self.second, x, **self.how)
        return self.third(x)


def recorded(model, step):
    """Operator -> its modules."""
    with Modules() as modules, Recorder(modules) as recorder:
        step()
    found = defaultdict(set)
    for key in recorder.rows:
        found[key.name].add((key.module, key.shapes))
    return found


def products(found):
    """Module -> in how many products its layer's width occurs."""
    counts = defaultdict(int)
    for module, shapes in found["aten::mm"]:
        assert f"{WIDTHS[module]}" in shapes.replace("[", " ").replace("]", " ").replace(",", " ")
        counts[module] += 1
    return counts


@pytest.mark.parametrize("how", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_forward_and_backward(how):
    """The first layer's input needs no gradient: torch's ModuleTracker never leaves it."""
    model = Model(how)
    found = recorded(model, lambda: model(torch.randn(3, 4)).sum().backward())
    assert products(found) == {"first": 2, "second.inner": 3, "third": 3}
    dropout = {module for name in ("aten::bernoulli_", "aten::mul") for module, _ in found[name]}
    assert {"second.dropout_with_a_long_name"} == dropout


def test_the_optimizer_is_in_no_module():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    assert {module for module, _ in recorded(model, step)["aten::addcdiv_"]} == {""}


def test_a_frozen_layer_passes_gradients_on():
    model = Model()
    model.second.requires_grad_(False)
    found = recorded(model, lambda: model(torch.randn(3, 4)).sum().backward())
    assert products(found) == {"first": 2, "second.inner": 2, "third": 3}


def test_a_forward_that_raises_is_left():
    model = Model()
    with Modules() as modules:
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        assert modules.current() == ""
