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
from benchmarks.figures import gpus
from benchmarks.harness import cuda, gpu, record, roofline, sources, suites
from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, NotInstalled, Skip, find
from benchmarks.harness.goals import GpuGoal, table
from benchmarks.harness.memory import Memory
from benchmarks.harness.run import COPY, Result, count_launches, run_case
from benchmarks.harness.timing import CPU, Machine, wall
from benchmarks.operators import norm
from fusedops.profiling import timing

ROOT = Path(__file__).parents[2]
DRY = Machine(CPU.device, dict.fromkeys(("device", "graph", "host"), wall), lambda call: 1)
STARTS = itertools.count()
ONLY = (norm.gpu.LAYER_NORM_CALL, "eager", "liger", "fusedops", "fusedops triton")


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
    assert gpus.figures(tmp_path) == gpus.NOT_YET
    assert {row["mode"] for row in document["rows"]} == {c.mode for c in family.GPU_ROWS[:2]}
    assert any(goal["measured"] is None and not goal["met"] for goal in document["goals"])


def test_match_leaves_rows_out_and_says_so(family, tmp_path):
    _, document = measured(tmp_path, match="host time")
    assert {row["clock"] for row in document["rows"]} == {"host"}
    assert all(("host time" in g["title"]) or g["met"] is False for g in document["goals"])
    assert gpus.figures(tmp_path) == gpus.NOT_YET  # it must not stand for a whole run
    with pytest.raises(SystemExit, match="no row of norm has 'nothing'"):
        measured(tmp_path, match="nothing")


def test_parts_of_one_build_make_a_whole(family, build, tmp_path):
    _, first = measured(tmp_path, match="device time")
    assert not first["complete"]
    _, both = measured(tmp_path, match="host time")
    kept = [row for row in both["rows"] if row["clock"] == "device"]
    assert kept == first["rows"] and not both["complete"]
    _, whole = measured(tmp_path, match="graph time")
    assert whole["complete"] and "Toy 1" in gpus.figures(tmp_path)
    assert set(whole["sources"]) == {"norm", "benchmark norm"} and not gpus.stale(whole)
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
    case = replace(small(norm.gpu.CALLED[0]), only=("eager", "fusedops", "fusedops triton"))
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

    case = small(norm.gpu.CALLED[0])
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
    assert len(first) == 25
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


def test_summary_has_the_goals_that_were_missed_by_most():
    def goal(title, what, asked, measured, met):
        return {"title": title, "what": what, "asked": asked, "measured": measured, "met": met}

    goals = [
        goal("a", "over eager", 2.0, [1.0, 0.9, 1.1], False),
        goal("b", "ms", 1.0, 4.0, False),
        goal("c", "TFLOP/s", 500.0, 400.0, False),
        goal("d", "over liger", 1.0, None, None),
        goal("e", "over eager", 1.0, None, False),
        goal("f", "over eager", 1.0, [2.0, 1.9, 2.1], True),
    ]
    text = gpu.summary([{"family": "toy", "goals": goals, "complete": False}])
    first, _, *worst = text.splitlines()
    assert first == "toy: 1 of 4 measured goals met, of 6; 1 rivals not installed; not whole"
    assert [line[0] for line in worst] == ["b", "a", "c"]
    assert "not installed" in table(goals).splitlines()[4]


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


def test_every_goal_has_its_row_and_every_operator_its_goals():
    assert all(ask.case in norm.GPU_ROWS for ask in norm.GPU_MUST_SHOW)
    titles = [case.title for case in norm.GPU_ROWS]
    assert len(set(titles)) == len(titles)  # by which rows of several runs are told apart
    asked = {ask.case.title: ask for ask in norm.GPU_MUST_SHOW}
    for name in (operation.name for operation in norm.OPERATIONS):
        for n in (1024, 2048, 4096, 8192, 16384):
            large = f"bfloat16 [16384, {n}], device time"
            assert asked[f"{name} {FORWARD} {large}"].at_least[COPY] == 0.95
            assert asked[f"{name} {BACKWARD} {large}"].at_least[COPY] == 0.84
            assert COPY not in asked[f"{name} {TRAINING} {large}"].at_least
        for tokens in (1, 16, 64):
            few = f"bfloat16 [{tokens}, 4096]"
            ask = asked[f"{name} {FORWARD} {few}, host time"]
            assert ask.launches == 1 and set(ask.at_least.values()) == {1.0, 1.5}
            for mode, clock in ((FORWARD, "graph"), (TRAINING, "host")):
                fewer = asked[f"{name} {mode} {few}, {clock} time"].at_least
                assert len(fewer) == 2 and set(fewer.values()) == {1.5}


def test_every_large_row_is_to_beat_its_rivals():
    asked = {ask.case.title: ask.at_least for ask in norm.GPU_MUST_SHOW}
    large = [case for case in norm.GPU_ROWS if case.clock == "device"]
    kinds = {(case.dtype, case.shape) for case in large}
    assert {(torch.float32, (16384, 4096)), (torch.float16, (16384, 4096))} <= kinds
    assert {(torch.bfloat16, (512, 65536)), (torch.bfloat16, (64, 262144))} <= kinds
    for case in large:
        rivals = [name for name in case.contenders() if name.startswith(("compile", "liger"))]
        rivals = ["eager"] if case.shape == (64, 262144) else rivals
        assert rivals and set(rivals) == asked[case.title].keys() - {COPY}


def test_goal_on_a_gpu_is_met_missed_or_not_measured():
    case = Case(norm.OPERATIONS[0], FORWARD, torch.bfloat16, (8, 8), clock="device")
    ask = GpuGoal(case, {COPY: 0.95, "liger": 1.0}, launches=1)
    result = Result(case, 0, {COPY: [0.9, 0.9], "fusedops": [1.0, 1.0]}, launches={"fusedops": 2})
    verdicts = ask.verdicts(result)
    assert [v["met"] for v in verdicts] == [False, False, False]
    result.seconds |= {COPY: [0.96, 0.96], "liger": [1.0, 1.0]}
    result.launches["fusedops"] = 1
    assert [v["met"] for v in ask.verdicts(result)] == [True, True, True]
    assert table(ask.verdicts(result)).splitlines()[-1].split()[-3:] == ["1", "1", "yes"]
    nothing = ask.verdicts(Result(case, 0))
    assert not any(v["met"] for v in nothing)
    assert table(nothing).count("not timed") == 3


def test_goal_in_milliseconds_tflops_and_bytes():
    case = Case(norm.OPERATIONS[0], FORWARD, torch.bfloat16, (8, 8), clock="device")
    ask = GpuGoal(case, {}, ms=2.0, tflop_per_s=600, beside=100)
    sizes = {"fusedops": Memory(150, 50)}
    result = Result(case, 0, {"fusedops": [2e-3]}, memory=sizes, flops=1_200_000_000_000)
    verdicts = ask.verdicts(result)
    assert [v["what"] for v in verdicts] == ["ms", "TFLOP/s", "bytes beside the results"]
    assert [v["measured"] for v in verdicts] == pytest.approx([2.0, 600.0, 100])
    assert all(v["met"] for v in verdicts)
    result.seconds["fusedops"], sizes["fusedops"] = [2.1e-3], Memory(151, 50)
    assert not any(v["met"] for v in ask.verdicts(result))
    nothing = ask.verdicts(Result(case, 0))
    assert not any(v["met"] for v in nothing) and table(nothing).count("not timed") == 3
    assert table(verdicts).splitlines()[2].split()[-3:] == ["600", "600", "yes"]


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


@pytest.mark.parametrize("family", ON_GPU)
def test_every_goal_has_its_row(family):
    module = suites.family(family)
    titles = [case.title for case in module.GPU_ROWS]
    assert len(set(titles)) == len(titles)  # by which rows of several runs are told apart
    goals = [ask.case.title for ask in module.GPU_MUST_SHOW]
    assert set(goals) <= set(titles) and len(set(goals)) == len(goals)


def copied(row, **other):
    return row | {"status": "timed", "dtype": "bfloat16", "launches": 1} | other


def document():
    """Returns a result as a GPU would give it; the figures are made up, as is the device."""
    forward = {"operation": "rms_norm", "mode": FORWARD, "clock": "device"}
    rows = [
        copied(forward, contender=name, shape=[16, n], median_s=s, percent_of_copy=50 / s)
        for n in (64, 128)
        for name, s in (("eager", 2.0 * n), ("liger", 1.5 * n), ("fusedops", n))
    ]
    where = {"device": "Toy 1", "driver": "1", "torch": "2", "triton": "3", "commit": "abc"}
    run = {
        "environment": where | {"date": "2000-01-01T00:00:00"},
        "ceilings": {"copy": {"gb_per_s": 4000.0}, "matmul": {"tflop_per_s": 700.0}},
    }
    return {
        "complete": True,
        "runs": [run],
        "rows": rows,
        "goals": [{"met": True}, {"met": False}],
    }


def test_page_shows_what_was_measured_and_nothing_else(tmp_path):
    assert gpus.figures(tmp_path) == gpus.NOT_YET
    (tmp_path / "toy-1").mkdir()
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(document()))
    text = gpus.figures(tmp_path)
    assert "norm on Toy 1" in text and "1 of 2 goals" in text and "4000 GB/s" in text
    assert "| times as fast in device time as | eager | Liger |" in text
    assert "| `rms_norm` forward, bfloat16 | 2.00x | 1.50x |" in text
    assert "*Measured before today's sources, at commit `abc`.*" in text
    current = document() | sources.stamp("norm", device="cuda")
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(current))
    assert "before today's sources" not in gpus.figures(tmp_path)
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(document() | {"complete": False}))
    assert gpus.figures(tmp_path) == gpus.NOT_YET


def test_page_refuses_what_was_measured_at_no_known_commit(tmp_path):
    found = document()
    found["runs"][0]["environment"]["commit"] = None
    (tmp_path / "toy-1").mkdir()
    (tmp_path / "toy-1" / "norm.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match=r"norm.json: of no known commit; set FUSEDOPS_COMMIT"):
        gpus.figures(tmp_path)


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
