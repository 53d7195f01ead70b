"""`fusedops.compare` says if a step got faster between two profiles of the same machine."""

from dataclasses import replace
from random import Random

import pytest

import fusedops
from fusedops.measuring.blocks import ratio_of
from fusedops.profiling.advice.advice import saving
from fusedops.profiling.report import Profile
from profiling.synthetic import MS, matmul, run, step


def report(seconds, seed=0, wait=0.0, **changes):
    evidence = step(matmul(10 * MS), plain=run(seconds, wait, jitter=0.05, seed=seed))
    return Profile(replace(evidence, about={"device": "EPYC", "torch": "2.13.0"}, **changes))


def test_a_faster_step(tmp_path):
    for name, seconds in (("before", 12 * MS), ("after", 10 * MS)):
        report(seconds, seed=len(name)).save(tmp_path / f"{name}.json")
    diff = fusedops.compare(tmp_path / "before.json", str(tmp_path / "after.json"))
    assert diff.verdict == "faster" and diff.ratio.median == pytest.approx(1.2, abs=0.03)
    assert diff.ratio.low < 1.2 < diff.ratio.high
    assert "faster: 1.19x (1.1" in str(diff) and "limited by compute\n" in str(diff)


def test_a_slower_and_an_equal_step():
    assert fusedops.compare(report(10 * MS), report(12 * MS, 1)).verdict == "slower"
    assert fusedops.compare(report(10 * MS), report(10 * MS, 1)).verdict == "no difference"


def test_both_verdicts_are_shown():
    diff = fusedops.compare(report(10 * MS, wait=40 * MS), report(10 * MS, 1))
    assert diff.bounds == (("input",), ("compute",))
    assert "limited by input before, by compute after" in str(diff)
    unclear = replace(diff, bounds=(("input",), ("unknown",)))
    assert "limited by input before, by no single resource after" in str(unclear)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("threads", {"threads": 2}),
        ("cpus", {"cpus": 8.0}),
        ("device", {"about": {"device": "Xeon", "torch": "2.13.0"}}),
        ("torch", {"about": {"device": "EPYC", "torch": "2.12.0"}}),
    ],
)
def test_another_machine_is_refused(name, changes):
    other = report(10 * MS)
    changed = Profile(replace(other.evidence, **changes))
    with pytest.raises(ValueError, match=f"compare: both reports must have the same {name}, got"):
        fusedops.compare(other, changed)


def test_the_intervals_of_equal_steps_contain_1():
    """Blocks of an A/A experiment whose noise is that of a busy machine, 200 times."""
    random, kept = Random(0), 0
    for _ in range(200):
        drift = [1 + 0.2 * random.random() for _ in range(20)]
        blocks = [[d * random.gauss(1, 0.03) for d in drift] for _ in range(2)]
        ratio = ratio_of(*blocks)
        kept += ratio.low <= 1 <= ratio.high
        saved = saving(*blocks)
        assert (saved.interval[0] <= 0 <= saved.interval[1]) == (ratio.low <= 1 <= ratio.high)
    assert kept >= 185
