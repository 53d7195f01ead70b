"""Tests `python -m benchmarks gpu` on a CPU: every family's rows, with invented times.

A toy machine has CPU tensors of few elements and a clock that calls once and shows an invented
time. Nothing below is a figure of a GPU, and nothing is written where docs/benchmarks.md would take
it for one.
"""

import itertools
import json
import math
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import ON_GPU
from benchmarks.harness import gpu, suites
from benchmarks.harness.case import NotInstalled, Skip, find
from benchmarks.harness.run import run_case
from benchmarks.harness.timing import Machine
from benchmarks.operators import norm, quantized_linear

ROOT = Path(__file__).parents[2]


def invented(call):
    """A clock: runs the call once, then shows a longer time at each reading."""
    call()
    times = itertools.count(1)
    return lambda repeats: next(times) * 1e-6


TOY = Machine(torch.device("cpu"), dict.fromkeys(("device", "graph", "host"), invented))


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


@pytest.fixture(autouse=True)
def small_and_uncompiled(monkeypatch):
    """Makes the families' rows small, the machine's limits invented, and compilation free."""
    family = suites.family

    def small(name):
        return Namespace(GPU_ROWS=[toy(name, case) for case in family(name).GPU_ROWS])

    monkeypatch.setattr(suites, "family", small)
    # Calls alternate between 256 MiB of weights: 131,072 copies of a toy weight in int4.
    # Here they alternate between two float32 weights, and between more of the other formats.
    monkeypatch.setattr(quantized_linear, "ROTATED", 1 << 15)
    monkeypatch.setattr(
        gpu, "ceilings", partial(gpu.ceilings, budget_s=0.01, copy_bytes=1 << 10, matmul_size=8)
    )
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.fixture
def rotary(monkeypatch):
    """The first row of each clock, of rotary alone."""
    rows = {case.clock: case for case in reversed(suites.family("rotary").GPU_ROWS)}
    family = Namespace(GPU_ROWS=[*rows.values()])
    monkeypatch.setattr(suites, "family", lambda name: family)
    return family.GPU_ROWS


def options(out, families=ON_GPU, **more):
    options = {"match": "", "compile": True, "seconds": 0.0, "process_s": 60.0}
    return Namespace(families=list(families), out=str(out), **options | more)


def measured(out, name="rotary", machine=TOY, **more):
    """The exit status of a family's rows, and the document that it wrote."""
    status = gpu.measure(options(out, [name], **more), partial(gpu.measure_family, machine=machine))
    return status, written(out, name)


def written(out, name="rotary"):
    (path,) = Path(out).glob(f"*/{name}.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ON_GPU)
def test_every_row_of_every_family_runs(name, tmp_path):
    titles = [case.title for case in suites.family(name).GPU_ROWS]
    assert len(set(titles)) == len(titles)
    status, document = measured(tmp_path, name)
    rows = document["rows"]
    assert status == 0 and document["complete"]
    assert list(dict.fromkeys(row["title"] for row in rows)) == titles
    ours = [row for row in rows if row["contender"] == "fusedops"]
    assert len(ours) == len(titles) and all(row["status"] == "timed" for row in ours)
    reasons = {f"{r['status']} {r['contender']}: {r['reason']}" for r in rows if "reason" in r}
    wrong = [r for r in reasons if not r.startswith(("skipped ", "not installed "))]
    assert not wrong, wrong


def test_a_row_has_its_share_of_the_ceiling(rotary, tmp_path):
    _, document = measured(tmp_path)
    top = document["ceilings"]["copy"]["gb_per_s"]
    rows = [row for row in document["rows"] if row["status"] == "timed"]
    assert document["timed_by"].keys() == {row["clock"] for row in rows}
    for row in rows:
        assert row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert (row["percent_of_copy"] is not None) == (row["clock"] == "device")
        share = pytest.approx(100 * row["gb_per_s"] / top) if row["clock"] == "device" else None
        assert row.get("percent_of_ceiling") == share
    assert document["ceilings"]["matmul"]["tflop_per_s"] > 0
    assert {"device", "torch", "date", "commit", "fusedops"} <= set(document["environment"])


def test_what_was_measured_is_kept_when_the_run_is_cut_short(rotary, tmp_path, monkeypatch):
    first, second, third = rotary

    def cut(case, *args, **kwargs):
        if case.title == third.title:
            raise KeyboardInterrupt
        return run_case(case, *args, **kwargs)

    monkeypatch.setattr(gpu, "run_case", cut)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path)
    document = written(tmp_path)
    assert not document["complete"]
    assert {row["title"] for row in document["rows"]} == {first.title, second.title}


def test_a_lost_device_ends_its_family(rotary, tmp_path, capsys):
    asked = itertools.count()
    lost = replace(TOY, lost=lambda: "an illegal access" if next(asked) >= 1 else None)
    status, document = measured(tmp_path, machine=lost)
    titles = [case.title for case in rotary]
    assert list(dict.fromkeys(row["title"] for row in document["rows"])) == titles[:2]
    assert status == 1 and not document["complete"]
    said = f"rotary: the device is lost after {titles[1]}: an illegal access"
    assert said in capsys.readouterr().out


def test_a_row_that_raises_while_it_is_timed_is_refused():
    """The clock's first readings admit the contenders; then the device fails."""
    readings = itertools.count()

    def failing(call):
        def seconds(repeats):
            if next(readings) > 3:
                raise RuntimeError("CUDA error: an illegal memory access")
            return 1e-6

        return seconds

    only = ("eager", "liger", "fusedops")
    called = next(case for case in norm.GPU_ROWS if case.clock == "host")
    case = replace(called, shape=(4, 64), dtype=torch.float32, only=only)
    result = run_case(case, 0.01, replace(TOY, clocks={"host": failing}), copy=False)
    assert not result.seconds and result.wrong()
    assert "illegal memory access" in result.refused["fusedops"]
    assert result.skipped["liger"] == "liger_kernel is not installed"


@pytest.mark.parametrize("status", [-6, 139])
def test_a_process_that_died_is_reported_and_the_others_run(tmp_path, status, capsys):
    done = []

    def process(args, name):
        done.append(name)
        return status if name == "linear" else 0

    assert gpu.measure(options(tmp_path), process) == 1 and done == list(ON_GPU)
    assert f"linear: its process ended with status {status}" in capsys.readouterr().out


def test_a_family_that_hangs_is_ended(tmp_path, capsys):
    assert gpu.in_a_process(options(tmp_path, process_s=0.05), "norm") == 1
    assert "norm: more than 0 s" in capsys.readouterr().out


def test_peer_that_is_not_installed_says_what_is_missing():
    with pytest.raises(NotInstalled, match="no_such_peer is not installed"):
        find("no_such_peer.norm", "rms_norm")
    with pytest.raises(Skip, match="no_such_name") as raised:
        find("json", "no_such_name")
    assert not isinstance(raised.value, NotInstalled)  # a package that should have it


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f"needs a GPU: torch {torch.__version__} finds no CUDA device" in run.stderr
    assert "Traceback" not in run.stderr
