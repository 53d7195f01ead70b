"""Ctrl-C in patch, unpatch, verify or fuse_always is raised and leaves nothing half changed."""

import subprocess
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from axes import grid
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fusedops import _C, fuse_always, patch, patched, unpatch, verify
from fusedops.measuring import undo
from fusedops.measuring.undo import afterwards, on_failure
from fusedops.patching.core import swap, thresholds

transformers = pytest.importorskip("transformers")
from patching.models.attention_models import build  # noqa: E402

HOME = Path(swap.__file__).parents[1]
EVERY = {undo.__file__, *map(str, HOME.rglob("*.py"))}
RESTORE = "core/swap", "core/fused_state", "core/config", "patch"
RESTORING = {undo.__file__, *(str(HOME / f"{name}.py") for name in RESTORE)}
POINTS = 130
DEVICES = ("cpu", "cuda")


class Interrupting:
    """Raises KeyboardInterrupt at the nth line that is run in some files.

    lines: how many were run. places: of each line of the code that restores, when it was run.
    """

    def __init__(self, files, nth=0):
        self.files, self.nth, self.lines, self.places = files, nth, 0, defaultdict(list)

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, event, argument):
        return self.line if frame.f_code.co_filename in self.files else None

    def line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if frame.f_code.co_filename in RESTORING:
                self.places[frame.f_code, frame.f_lineno].append(self.lines)
            if self.lines == self.nth:
                raise KeyboardInterrupt
        return self.line


def points(files, run):
    """Lines of a run, evenly spread, and each line that restores, at its first and last run."""
    with Interrupting(files) as counted:
        run()
    n = counted.lines
    spread = {1 + i * (n - 1) // POINTS for i in range(POINTS + 1)}
    ends = {at for runs in counted.places.values() for at in (runs[0], runs[-1])}
    return sorted({*spread, *ends})


def interrupted(files, nth, run):
    """Whether the run was interrupted: it may be shorter than the one that was counted."""
    with Interrupting(files, nth) as counted:
        try:
            run()
        except KeyboardInterrupt:
            return True
    assert counted.lines < nth  # else the interrupt was lost
    return False


def assert_unchanged(model, files, counted, run):
    """Interrupts a run at lines of `counted`. After each interrupt the model must be unchanged."""
    before, count = state(model), 0
    for nth in points(files, counted):
        count += interrupted(files, nth, run)
        assert state(model) == before, nth
    assert count >= 150


def state(model):
    """All that patch and verify may change: the model, its config, and the thread's settings."""
    modules = [
        (type(m), {k: v if type(v) is bool else id(v) for k, v in vars(m).items()}, *hooks(m))
        for m in model.modules()
    ]
    return modules, dict(vars(getattr(model, "config", model))), thread()


def thread():
    """Returns the settings that a skipped exit of a `with` block would leave changed."""
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    depth = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    modes = [*_get_current_function_mode_stack()], [*_get_current_dispatch_mode_stack()]
    return torch.is_grad_enabled(), casts, depth, modes, [*warnings.filters]


def hooks(module):
    return len(module._forward_hooks), len(module._forward_pre_hooks)


def half():
    """Patched in part, with eager attention, and another library's class on a module."""
    model = build("llama")
    model.set_attn_implementation("eager")
    patch(model, attention=False, rotary=False)
    norm = model.model.layers[1].input_layernorm
    norm.__class__ = type("Sharded", (type(norm),), {})
    return model


def test_patch():
    """The model is as if patch had not been called."""
    model, other = half(), half()
    patch(half())  # what is found out about a class is kept
    assert_unchanged(model, EVERY, lambda: patch(other), lambda: patch(model))
    patch(model)
    assert len(swap.fused_modules(model)) == len(swap.fused_modules(other))


def test_unpatch():
    """It either completes or has not begun."""
    model = half()
    patch(model)
    lines = points(RESTORING, lambda: unpatch(model))
    without, count = state(model), 0
    for nth in lines:
        patch(model)
        patched_state = state(model)
        count += interrupted(RESTORING, nth, lambda: unpatch(model))
        assert state(model) == without or (nth < 20 and state(model) == patched_state), nth
        unpatch(model)
    assert count >= 120


@pytest.mark.parametrize("restored", ["patched", "original"])
def test_blocks(restored):
    """The interrupt comes when the block begins or ends."""
    model = half()
    if restored == "original":
        patch(model)

    def run():
        with patched(model) if restored == "patched" else swap.original(model):
            pass

    run()
    assert_unchanged(model, RESTORING, run, run)


def test_verify():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    files = RESTORING | {str(HOME / "yardstick.py"), str(HOME / "verify.py")}
    x = torch.randn(3, 8)

    def run():
        with fuse_always():
            assert verify(model, x).right

    run()
    assert_unchanged(model, files, run, run)


@grid(times=[1, 3], block=[afterwards, on_failure])
def test_interrupts_that_follow_one_another(block, times):
    done, tried = [], []

    def restore():
        tried.append(len(tried))
        if len(tried) <= times:
            raise KeyboardInterrupt
        done.append(True)

    with pytest.raises(KeyboardInterrupt), block(restore):
        raise ValueError("of the block")
    assert done == [True] and len(tried) == times + 1


def test_fuse_always():
    files = {undo.__file__, thresholds.__file__}

    def run():
        with fuse_always():
            assert thresholds._always

    count = 0
    for nth in points(files, run):
        count += interrupted(files, nth, run)
        assert not thresholds._always and not _C.own_product_pays(torch.float32, 1, 1, 1, False)
        with ThreadPoolExecutor(1) as pool:  # in which no lock is held
            pool.submit(run).result(timeout=10)
    assert count > 20


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
