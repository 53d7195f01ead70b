"""Ctrl-C in patch, verify and counts: the model is as before, if need be after unpatch."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fusedops import patch, unpatch, verify
from fusedops.patching.core import swap
from fusedops.patching.core.swap import fused_modules
from patching.models.attention_models import build

POINTS = 20


class Interrupting:
    """Raises KeyboardInterrupt at the nth line that runs in core/swap.py, and counts the lines."""

    def __init__(self, nth=0):
        self.nth, self.lines = nth, 0

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, event, argument):
        return self.line if frame.f_code.co_filename == swap.__file__ else None

    def line(self, frame, event, argument):
        self.lines += event == "line"
        if event == "line" and self.lines == self.nth:
            raise KeyboardInterrupt
        return self.line


def state(model):
    """All that patch and verify may change: the modules, their hooks and the model's config."""
    modules = [
        (type(m), {k: v if type(v) is bool else id(v) for k, v in vars(m).items()}, *hooks(m))
        for m in model.modules()
    ]
    return modules, dict(vars(getattr(model, "config", model)))


def hooks(module):
    return len(module._forward_hooks), len(module._forward_pre_hooks)


def interrupted_patches(model):
    """Yields after each of several patches of the model, interrupted at lines of swap.py."""
    patch(model)  # what is found out about a class is kept
    unpatch(model)
    with Interrupting() as counted:
        patch(model)
    unpatch(model)
    for i in range(POINTS):
        with pytest.raises(KeyboardInterrupt), Interrupting(1 + i * (counted.lines - 1) // POINTS):
            patch(model)
        yield


def test_unpatch_restores_a_model_that_was_left_patched_in_part(monkeypatch):
    """A second interrupt comes while patch restores the model."""

    def interrupt(*_):
        raise KeyboardInterrupt

    model, in_part = build("llama"), 0
    before = state(model)
    monkeypatch.setitem(patch.__globals__, "restore_states", interrupt)
    for _ in interrupted_patches(model):
        in_part += bool(fused_modules(model))
        unpatch(model)
        assert state(model) == before
    assert in_part > POINTS / 2


class Stops(nn.Module):
    """Is interrupted in its nth forward."""

    def __init__(self, nth):
        super().__init__()
        self.left = [nth]

    def forward(self, x):
        self.left[0] -= 1
        if self.left[0] == 0:
            raise KeyboardInterrupt
        return x


CALLS = {
    "verify": lambda model, x: verify(model, x),
    "patch": lambda model, x: patch(model, verify=x),
    "counts": lambda model, x: patch(model).counts(x),
}


@pytest.mark.parametrize(
    ("what", "nth"), [("verify", 1), ("verify", 4), ("patch", 2), ("counts", 1)]
)
def test_an_interrupt_in_a_forward(what, nth):
    stops = Stops(0)
    model, x = nn.Sequential(nn.LayerNorm(8), stops, nn.Linear(8, 8)), torch.randn(3, 8)
    if what == "counts":
        patch(model)
    before = state(model)
    stops.left[0] = nth
    with pytest.raises(KeyboardInterrupt):
        CALLS[what](model, x)
    assert state(model) == before and torch.is_grad_enabled()


@pytest.mark.parametrize("block", ["fuse_always()", "patched(model)"])
def test_a_block_that_is_never_left_ends_with_the_process(block):
    """Globals may be None by then."""
    code = f"""
import torch, fusedops
from fusedops import fuse_always, patched

def suspended(block):
    with block:
        yield

model = torch.nn.Sequential(torch.nn.LayerNorm(8))
block = {block}
block.__enter__()
generator = suspended({block})
next(generator)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ran.stderr
