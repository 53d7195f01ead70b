"""Tests the goals of GPU benchmarks, and the page and the summary that show them.

No figure below is a GPU's, and nothing is written where docs/benchmarks.md would take it for one.
"""

import pytest
import torch

from benchmarks import ON_GPU
from benchmarks.harness import gpu, suites
from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case
from benchmarks.harness.goals import GpuGoal, table
from benchmarks.harness.memory import Memory
from benchmarks.harness.run import COPY, Result
from benchmarks.operators import norm


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


def test_every_goal_has_its_row_and_every_operator_its_goals():
    assert all(ask.case in norm.GPU_ROWS for ask in norm.GPU_MUST_SHOW)
    titles = [case.title for case in norm.GPU_ROWS]
    assert len(set(titles)) == len(titles)  # a title identifies its row in several runs
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


@pytest.mark.parametrize("family", ON_GPU)
def test_every_goal_has_its_row(family):
    module = suites.family(family)
    titles = [case.title for case in module.GPU_ROWS]
    assert len(set(titles)) == len(titles)  # a title identifies its row in several runs
    goals = [ask.case.title for ask in module.GPU_MUST_SHOW]
    assert set(goals) <= set(titles) and len(set(goals)) == len(goals)
