"""Runs every case of `python -m benchmarks gpu` on small CPU tensors, with invented times.

A toy machine has CPU tensors of few elements and a clock that calls once and shows an invented
time. torch.compile returns the function itself. So the rows' inputs, contenders, clocks and goals
are run, and nothing is a figure of a GPU.
"""

import itertools
import json
import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from benchmarks import ON_GPU
from benchmarks.harness import gpu, roofline, suites
from benchmarks.harness.memory import Memory
from benchmarks.harness.timing import Machine
from benchmarks.operators import quantized_linear


def invented(call):
    """A clock: runs the call once, then shows a longer time at each reading."""
    call()
    times = itertools.count(1)
    return lambda repeats: next(times) * 1e-6


TOY = Machine(
    torch.device("cpu"),
    dict.fromkeys(("device", "graph", "host"), invented),
    lambda call: (call(), 1)[1],
    lambda call: (call(), Memory(70, 20))[1],
)


def few(n):
    """A dimension of few elements, which differs between the rows' sizes."""
    return n if n <= 16 else round(8 * math.log2(n))


def toy(name, case):
    """The row with few elements."""
    first, *others = map(few, case.shape)
    shape = {
        "attention": lambda: (
            min(first, 2),
            4,
            2 if len({*case.shape[1:3]}) > 1 else 4,
            *others[2:4],
            64,
        ),
        "quantized_linear": lambda: (first, 64, 64),
        "rotary": lambda: (first, 4, 4 if len({*case.shape[1:3]}) == 1 else 2, others[2], 64),
    }.get(name, lambda: (first, *others))()
    return replace(case, shape=shape)


@pytest.fixture
def machine(monkeypatch):
    """Makes the families' rows small, the machine's limits invented, and compilation free."""
    family = suites.family

    def small(name):
        module = family(name)
        return Namespace(
            GPU_ROWS=[toy(name, case) for case in module.GPU_ROWS],
            GPU_FIRST=[toy(name, case) for case in module.GPU_FIRST],
            GPU_MUST_SHOW=[replace(g, case=toy(name, g.case)) for g in module.GPU_MUST_SHOW],
        )

    monkeypatch.setattr(suites, "family", small)
    # Calls alternate between 256 MiB of weights: 131,072 copies of a toy weight in int4.
    # Here they alternate between two float32 weights, and between more of the other formats.
    monkeypatch.setattr(quantized_linear, "ROTATED", 1 << 15)
    monkeypatch.setattr(gpu, "ceilings", lambda m: roofline.ceilings(m, 0.01, 1 << 10, 8))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return TOY


def command(out, families=ON_GPU, **more):
    options = {"match": "", "passes": None, "seconds": 0.0, "again": False, "started": "a"}
    return Namespace(families=list(families), out=str(out), process_s=60.0, **options | more)


@pytest.mark.parametrize("name", ON_GPU)
def test_every_row_of_every_family_runs(machine, name, tmp_path):
    args = command(tmp_path, [name])
    for part in reversed(gpu.PASSES):  # so that each row is run once, with all contenders
        assert gpu.measure_family(args, name, part, machine) == 0
    (path,) = tmp_path.glob(f"*/{name}.json")
    document = json.loads(path.read_text())
    rows = document["rows"]
    assert document["complete"]
    titles = [case.title for case in suites.family(name).GPU_ROWS]
    assert list(dict.fromkeys(row["title"] for row in rows)) == titles
    ours = [row for row in rows if row["contender"] == "fusedops"]
    assert len(ours) == len(titles) and all(row["status"] == "timed" for row in ours)
    reasons = {f"{r['status']} {r['contender']}: {r['reason']}" for r in rows if "reason" in r}
    wrong = [r for r in reasons if not r.startswith(("skipped ", "not installed "))]
    assert not wrong, wrong
    goals = {goal["what"]: goal for goal in document["goals"] if goal["measured"] is None}
    assert all(goal["met"] is None for goal in goals.values()), goals
    assert not list(tmp_path.glob("*/*.running"))
