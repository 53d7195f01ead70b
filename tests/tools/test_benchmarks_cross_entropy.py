"""The cross_entropy benchmark's rows run at small sizes, with goals and memory.

The clocks of the GPU are the CPU's here.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.harness import suites, worker
from benchmarks.harness.case import FORWARD, TRAINING, Case
from benchmarks.harness.run import run_case
from benchmarks.harness.timing import CPU, Machine, wall
from benchmarks.operators import cross_entropy

DRY = Machine(CPU.device, dict.fromkeys(("device", "graph", "host"), wall))


def test_memory_of_a_row_that_is_asked_about(monkeypatch):
    case = Case(cross_entropy.LINEAR, TRAINING, torch.bfloat16, (512, 64, 4000))
    monkeypatch.setattr(suites, "weighed", lambda: [case])
    names = ("huggingface", "fusedops")
    both = {name: worker._weigh_here(case.title, name, 1) for name in names}
    assert {m.results for m in both.values()} == {2 * (512 * 64 + 4000 * 64)}
    assert both["huggingface"].peak > 4 * 512 * 4000 > both["fusedops"].peak


def dry(case, shape):
    """Returns the row with few elements, of contenders that a CPU is quick with."""
    only = tuple(name for name in case.contenders() if not name.startswith("compile"))
    return replace(case, shape=shape, dtype=torch.float32, only=only)


def first_of_each(cases):
    """Returns one row for each operation, mode and clock."""
    return {(c.operation.name, c.mode, c.clock): c for c in reversed(cases)}.values()


@pytest.mark.parametrize("case", first_of_each(cross_entropy.GPU_ROWS), ids=lambda c: c.title)
def test_rows_of_cross_entropy_run(case):
    result = run_case(dry(case, (4, 100) if len(case.shape) == 2 else (4, 16, 100)), 0.02, DRY)
    assert not result.refused and {"eager", "fusedops"} <= result.seconds.keys()
    assert result.skipped.keys() <= {"liger", "torch chunked"}  # Liger is not installed


@pytest.mark.parametrize("mode", [FORWARD, TRAINING])
def test_liger_overwrites_logits_of_its_own(monkeypatch, mode):
    overwritten = []

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, target):
            overwritten.append(x.data_ptr())
            if x.requires_grad:
                x.data.sub_(1)
            ctx.save_for_backward(x.detach())
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0], None

    where = "benchmarks.operators.cross_entropy.find"
    monkeypatch.setattr(where, lambda module, name: Overwriting.apply)
    case = replace(cross_entropy.GPU_ROWS[0], mode=mode, only=("liger", "fusedops"))
    case = replace(case, shape=(4, 100), dtype=torch.float32)
    result = run_case(case, 0.02, DRY)
    assert {"liger", "fusedops"} <= result.seconds.keys() and not result.refused
    assert len(set(overwritten)) == 2  # a copy of each of the two that take turns
