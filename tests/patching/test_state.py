"""Tests `_fusedops`, the one attribute that patch adds to modules."""

import copy
import dataclasses
import pickle

import pytest
import torch
from children import forked
from torch import nn

from fusedops.patching import patch, unpatch
from fusedops.patching.core.fused_state import FusedState
from fusedops.patching.core.swap import fused_modules


class Layer(nn.Module):
    """A sum and its norm, an activated linear, and a gated product."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.gate = (nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
        self.act = nn.GELU()

    def forward(self, x):
        h = x + self.fc(x)
        y = self.norm(h)
        return h + self.act(self.gate(y)) * self.fc(y)


@pytest.fixture
def model(any_size):
    return nn.Sequential(Layer())


def names(model):
    return {name for m in model.modules() for name in (*vars(m), *dir(type(m)))}


def test_patch_adds_one_attribute(model):
    before = names(model)
    patch(model)
    assert {name for name in names(model) - before if "fusedops" in name} == {"_fusedops"}
    assert not any("_fusedops" in vars(module) for module in model.modules())
    unpatch(model)
    assert names(model) == before


def test_every_field_is_documented():
    text = FusedState.__doc__
    for field in dataclasses.fields(FusedState):
        assert f"    {field.name}: " in text, field.name


def below_another_class(module):
    module.__class__ = type("Sharded", (type(module),), {})


@pytest.mark.parametrize("child", ["", "norm", "fc", "act"])
def test_a_module_below_another_class_is_switched_off_and_on(model, child):
    patch(model)
    module = model[0].get_submodule(child)
    below_another_class(module)
    assert module in fused_modules(model)
    unpatch(model)
    assert fused_modules(model) == set()
    assert not vars(module)["_fusedops"].is_on
    patch(model)
    assert module in fused_modules(model)


def test_kinds_that_are_asked_for_again_run_below_another_class(model):
    patch(model)
    below_another_class(model[0])
    unpatch(model)
    patch(model, mlp=False, linear=False, rotary=False, attention=False)
    assert model[0]._fusedops.lines == {"residual"}
    assert model[0] in fused_modules(model)
    patch(model)
    assert model[0]._fusedops.lines >= {"residual", "mlp"}


def test_copies_of_a_module_that_is_switched_off_are_off(model):
    patch(model)
    below_another_class(model[0].norm)
    unpatch(model)
    new = copy.deepcopy(model)
    assert new[0].norm in set(new.modules()) and fused_modules(new) == set()
    x = torch.randn(2, 8)
    assert torch.equal(new(x), model(x))


def test_a_pickle_of_a_module_that_is_switched_off_needs_no_fusedops(model, tmp_path):
    patch(model)
    norm = model[0].norm
    below_another_class(norm)
    unpatch(model)
    file = tmp_path / "norm.pt"
    file.write_bytes(pickle.dumps(norm.__dict__))
    code = f"""
import pickle, sys
held = pickle.load(open({str(file)!r}, "rb"))
assert held["_fusedops"] is None and "fusedops" not in sys.modules
"""
    forked("-c", code).printed()


def test_a_module_loaded_from_such_a_pickle_can_be_patched(model):
    patch(model)
    norm = model[0].norm
    below_another_class(norm)
    unpatch(model)
    new = nn.LayerNorm(8)
    vars(new).update(pickle.loads(pickle.dumps(vars(norm))))
    other = nn.Sequential(new)
    patch(other)
    assert fused_modules(other) == {new}
    unpatch(other)
    assert "_fusedops" not in vars(new)
