"""Tests `python -m benchmarks gpu` on a CPU, with CPU timers instead of the GPU's.

Nothing below is a figure of a GPU, and nothing is written where docs/benchmarks.md would take it
for one.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import ON_GPU
from benchmarks.harness import cuda, gpu, record, report, roofline, suites
from benchmarks.harness.case import NotInstalled, Skip, find
from benchmarks.harness.memory import Memory
from benchmarks.harness.run import count_launches, run_case
from benchmarks.harness.timing import CPU, Machine, wall
from benchmarks.operators import norm
from fusedops.profiling import timing

ROOT = Path(__file__).parents[2]
DRY = Machine(CPU.device, dict.fromkeys(("device", "graph", "host"), wall), lambda call: 1)
STARTS = itertools.count()
ONLY = (norm.LAYER_NORM_CALL, "eager", "liger", "fusedops", "fusedops triton")


def small(case):
    """Returns the row with few elements, in a dtype and of contenders that a CPU is quick with."""
    only = tuple(name for name in ONLY if name in case.operation.contenders)
    return replace(case, shape=(4, 64), dtype=torch.float32, only=only)


@pytest.fixture
def family(monkeypatch):
    """Returns the norm family's first row of each clock and mode, and what is asked of them."""
    first = {(case.clock, case.mode): case for case in reversed(norm.GPU_ROWS)}.values()
    asked = [ask for ask in norm.GPU_MUST_SHOW if ask.case in first]
    toy = Namespace(
        GPU_ROWS=[small(case) for case in first],
        GPU_FIRST=[small(case) for case in first][:2],
        GPU_MUST_SHOW=[replace(ask, case=small(ask.case)) for ask in asked],
    )
    monkeypatch.setattr(suites, "family", lambda name: toy)
    monkeypatch.setattr(gpu, "ceilings", lambda m: roofline.ceilings(m, 0.02, 1 << 16, 32))
    return toy


def measured(out, match="", machine=DRY, **options):
    """Returns the exit status of the suite, and the document that it wrote.

    Each run has another name, and its passes run in this process.
    """
    options = {"match": match, "passes": None, "again": False, "seconds": 0.02} | options
    args = Namespace(families=["norm"], out=str(out), started=str(next(STARTS)), **options)
    here = functools.partial(gpu.measure_family, machine=machine)
    status = gpu.measure(args, here)
    return status, written(out)


def written(out):
    (path,) = Path(out).glob("*/norm.json")
    return json.loads(path.read_text())


@pytest.fixture
def build(monkeypatch):
    """Returns the environment's build record, for tests to change; each run has its own date."""
    about, dates = {"device": "Toy 1", "commit": "abc", "torch": "2", "triton": "3"}, []

    def environment(*_):
        dates.append(f"2000-01-{len(dates) + 1:02}")
        return about | {"driver": "1", "date": dates[-1]}

    monkeypatch.setattr(gpu, "environment", environment)
    return about


def test_suite_writes_every_row_with_its_share_of_the_ceiling(family, tmp_path):
    status, document = measured(tmp_path)
    rows = [row for row in document["rows"] if row["status"] == "timed"]
    assert {(r["clock"], r["mode"]) for r in rows} == {(c.clock, c.mode) for c in family.GPU_ROWS}
    run = document["runs"][-1]
    top = run["ceilings"]["copy"]["gb_per_s"]
    for row in rows:
        assert row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert (row["percent_of_copy"] is not None) == (row["clock"] == "device")
        share = pytest.approx(100 * row["gb_per_s"] / top) if row["clock"] == "device" else None
        assert row.get("percent_of_ceiling") == share
    assert document["timed_by"].keys() == {row["clock"] for row in rows}
    left_out = [row for row in document["rows"] if row["status"] != "timed"]
    status_of = {row["contender"]: row["status"] for row in left_out}
    assert status_of == {"liger": "not installed", "fusedops triton": "skipped"}
    assert all(row["reason"] for row in left_out)
    launches = {r["contender"]: r["launches"] for r in rows if "launches" in r}
    assert launches == {"fusedops": 1}
    assert document["complete"]
    assert run["ceilings"]["matmul"]["tflop_per_s"] > 0
    assert {"device", "torch", "date", "commit"} <= set(run["environment"])
    over_liger = [goal for goal in document["goals"] if goal["what"] == "over liger"]
    assert over_liger and all(goal["met"] is None for goal in over_liger)
    assert status == any(goal["met"] is False for goal in document["goals"])


def test_what_was_measured_is_kept_when_the_run_is_cut_short(family, tmp_path, monkeypatch):
    run_case = gpu.run_case

    def cut(case, *args, **kwargs):
        if case == family.GPU_ROWS[2]:
            raise KeyboardInterrupt
        return run_case(case, *args, **kwargs)

    monkeypatch.setattr(gpu, "run_case", cut)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path)
    document = written(tmp_path)
    assert not document["complete"]
    assert {row["mode"] for row in document["rows"]} == {c.mode for c in family.GPU_ROWS[:2]}
    assert any(goal["measured"] is None and not goal["met"] for goal in document["goals"])


def test_match_leaves_rows_out_and_says_so(family, tmp_path):
    _, document = measured(tmp_path, match="host time")
    assert {row["clock"] for row in document["rows"]} == {"host"}
    assert all(("host time" in g["title"]) or g["met"] is False for g in document["goals"])
    assert not document["complete"]
    with pytest.raises(SystemExit, match="no row of norm has 'nothing'"):
        measured(tmp_path, match="nothing")


def test_parts_of_one_build_make_a_whole(family, build, tmp_path):
    _, first = measured(tmp_path, match="device time")
    assert not first["complete"]
    _, both = measured(tmp_path, match="host time")
    kept = [row for row in both["rows"] if row["clock"] == "device"]
    assert kept == first["rows"] and not both["complete"]
    _, whole = measured(tmp_path, match="graph time")
    assert whole["complete"] and whole["cpu"] == report.cpu()
    matches = dict.fromkeys(run["match"] for run in whole["runs"])
    assert [*matches] == ["device time", "host time", "graph time"]
    _, same = measured(tmp_path, match="time")
    assert same["rows"] == whole["rows"]  # nothing was left to measure
    _, again = measured(tmp_path, match="time", again=True)
    assert {run["match"] for run in again["runs"]} == {"time"}
    assert len({row["run"] for row in again["rows"]} - {row["run"] for row in whole["rows"]}) == 2
    titles = [case.title for case in family.GPU_ROWS]
    assert list(dict.fromkeys(row["title"] for row in again["rows"])) == titles
    assert all(doc["goals"][0].keys() == again["goals"][0].keys() for doc in (first, whole))
    assert len(first["goals"]) == len(again["goals"])


@pytest.mark.parametrize("other", [{"commit": "def"}, {"torch": "2.1"}, {"triton": "4"}], ids=str)
def test_parts_of_two_builds_do_not(family, build, tmp_path, other):
    measured(tmp_path, match="device time")
    build |= other
    _, document = measured(tmp_path, match="host time")
    assert {row["clock"] for row in document["rows"]} == {"host"}


def test_two_changed_trees_are_never_the_same_build():
    tree = dict.fromkeys(record.SAME, "1")
    assert record.same_build(tree, dict(tree))
    for commit in (None, "abc-dirty"):
        assert not record.same_build(tree | {"commit": commit}, tree | {"commit": commit})


def test_launches_are_counted_of_ours_that_run():
    case = replace(small(norm.CALLED[0]), only=("eager", "fusedops", "fusedops triton"))
    assert count_launches(case, DRY) == {"fusedops": 1}


def test_launches_are_counted_after_all_timing_of_a_process(family, tmp_path, monkeypatch):
    """A profiler may slow down every later launch."""
    done, run_case = [], gpu.run_case
    monkeypatch.setattr(gpu, "run_case", lambda *a, **k: done.append("time") or run_case(*a, **k))
    counting = replace(DRY, launches=lambda call: done.append("count") or 1)
    measured(tmp_path, machine=counting, match="host time", passes=["others"])
    assert "count" in done and "time" not in done[done.index("count") :]


def test_what_has_been_measured_is_not_measured_again(family, tmp_path, build, monkeypatch):
    measured(tmp_path, passes=["first"])
    titles, run_case = [], gpu.run_case

    def listed(case, *args, **kwargs):
        titles.append(case.title)
        return run_case(case, *args, **kwargs)

    monkeypatch.setattr(gpu, "run_case", listed)
    _, document = measured(tmp_path)
    assert titles == [case.title for case in family.GPU_ROWS[2:]] and document["complete"]


def losing(after):
    """A machine whose device is lost after so many rows."""
    asked = itertools.count()
    return replace(DRY, lost=lambda: "an illegal access" if next(asked) >= after else None)


def test_a_lost_device_ends_its_family_alone(family, tmp_path, capsys):
    status, document = measured(tmp_path, passes=["others"], machine=losing(after=1))
    others = [case.title for case in family.GPU_ROWS[2:]]
    assert list(dict.fromkeys(row["title"] for row in document["rows"])) == others[:2]
    assert status == 1 and not document["complete"]
    said = f"norm: the device is lost after {others[1]}: an illegal access"
    assert said in capsys.readouterr().out
    _, document = measured(tmp_path)  # another process
    assert document["complete"]


def test_a_row_that_raises_while_it_is_timed_is_refused():
    """The clock's first readings admit the contenders; then the device fails."""
    readings = itertools.count()

    def failing(call):
        def seconds(repeats):
            if next(readings) > 3:
                raise RuntimeError("CUDA error: an illegal memory access")
            return 1e-6

        return seconds

    case = small(norm.CALLED[0])
    machine = replace(DRY, clocks={"host": failing})
    result = run_case(case, 0.01, machine, copy=False)
    assert not result.seconds and result.wrong()
    assert "illegal memory access" in result.refused["fusedops"]
    assert result.skipped["liger"] == "liger_kernel is not installed"


def test_a_row_that_ended_its_process_comes_last(family, tmp_path, build, monkeypatch):
    run_case, fatal = gpu.run_case, family.GPU_ROWS[2].title

    def dying(case, *args, **kwargs):
        if case.title == fatal:
            raise KeyboardInterrupt
        return run_case(case, *args, **kwargs)

    monkeypatch.setattr(gpu, "run_case", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measured(tmp_path)
    found = {row["title"] for row in written(tmp_path)["rows"]}
    assert found == {case.title for case in family.GPU_ROWS} - {fatal}


def test_passes_go_over_all_families_and_compile_comes_last():
    done = []

    def process(args, family, part):
        done.append((part, family))
        return 0

    args = Namespace(families=list(ON_GPU), match="", passes=None, out="nowhere")
    assert gpu.measure(args, process) == 0
    assert [part for part, _ in done] == sorted((part for part, _ in done), key=gpu.PASSES.index)
    assert [name for part, name in done if part == "first"] == gpu.by_doubt(ON_GPU)
    assert {name for _, name in done} == set(ON_GPU)
    first = [row for name in ON_GPU for row in gpu.rows_of(name, "first")]
    assert len(first) == 26
    for name in ON_GPU:
        first, others, compiled = ([*gpu.rows_of(name, part)] for part in gpu.PASSES)
        titles = [case.title for case in first + others]
        assert sorted(titles) == sorted(case.title for case in suites.family(name).GPU_ROWS)
        assert not [n for case in first + others for n in case.contenders() if "compile" in n]
        assert all(any("compile" in n for n in case.contenders()) for case in compiled)


@pytest.mark.parametrize("status", [-6, 139])
def test_a_process_that_died_is_reported(status, capsys):
    args = Namespace(families=["linear"], match="", passes=["first"], out="nowhere")
    assert gpu.measure(args, lambda *_: status) == 1
    assert f"linear: its process ended with status {status}" in capsys.readouterr().out


def test_a_family_that_hangs_is_ended(tmp_path, capsys):
    args = Namespace(
        match="", out=str(tmp_path), seconds=1, started="1", again=False, process_s=0.05
    )
    assert gpu.in_a_process(args, "norm", "first") == 1
    assert "norm: more than 0 s" in capsys.readouterr().out


def timed_as(monkeypatch, device_us, host_us, call_us):
    """Returns a machine on which a flush and a call cost that much."""

    def host(call):
        return lambda repeats: (host_us if call is cuda._flush else call_us) / 1e6

    monkeypatch.setattr(cuda, "_flush", lambda: None)
    monkeypatch.setattr(cuda, "_elapsed_s", lambda call, repeats: device_us / 1e6)
    monkeypatch.setattr(cuda, "host", host)
    cuda._lead_s.cache_clear()
    return lambda: None


def test_flushes_put_the_host_ahead_of_the_device(monkeypatch):
    call = timed_as(monkeypatch, device_us=25, host_us=13, call_us=30)
    flushes = cuda.flushes_before(call)
    assert flushes == 6  # 5 times 12 us are twice a call; one more for the cache
    with pytest.raises(RuntimeError, match="takes the device 10 us and the host 12 us"):
        cuda.flushes_before(timed_as(monkeypatch, device_us=10, host_us=12, call_us=30))
    cuda._lead_s.cache_clear()


def test_peer_that_is_not_installed_says_what_is_missing():
    with pytest.raises(NotInstalled, match="no_such_peer is not installed"):
        find("no_such_peer.norm", "rms_norm")
    with pytest.raises(Skip, match="no_such_name") as raised:
        find("json", "no_such_name")
    assert not isinstance(raised.value, NotInstalled)  # a package that should have it


def test_memory_on_a_gpu_is_that_of_a_call_after_the_first(monkeypatch):
    calls, now = [], [1000]

    def call():
        calls.append(1)
        return [torch.ones(2), torch.ones(3)]

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now[0] * len(calls))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now[0] + 70)
    assert cuda.memory(call) == Memory(70, 20) and len(calls) == 2


def test_state_of_the_gpu_is_that_of_its_own_line(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    lines = ("GPU-11-aa, 580.1, 345, 3201, 1980, 3201, 700.00, 30", "GPU-22-bb, 580.1" + ", 1" * 6)
    fake.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    state = timing._gpu_state("11-aa")
    assert (state["driver"], state["sm_clock"], state["power_limit"]) == ("580.1", "345", "700.00")
    assert timing._gpu_state("33-cc")["driver"] is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert set(timing._gpu_state("11-aa").values()) == {None}


def test_slug():
    assert timing.slug("NVIDIA H200") == "nvidia-h200"
    assert timing.slug("AMD EPYC (9B14)") == "amd-epyc-9b14"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", [["benchmarks", "gpu"], ["benchmarks.harness.cuda"]], ids=str)
def test_without_a_gpu_it_says_so(command):
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert f"needs a GPU: torch {torch.__version__} finds no CUDA device" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_machine_of_cuda_needs_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU"):
        cuda.machine()
