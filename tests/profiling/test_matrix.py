"""Tests the profiler's verdicts on recorded steps; `make profile-matrix` records them."""

from pathlib import Path

import pytest

from benchmarks.bottlenecks.cases import CASES, PAIRS, WITHOUT_CONTROL
from benchmarks.bottlenecks.matrix import Row, load, matrix, right, save

ROOT = Path(__file__).parents[2]
RECORDED = load(Path(__file__).parent / "recorded")
ALL = CASES | PAIRS


def test_every_case_was_recorded_with_five_seeds():
    assert set(RECORDED) == set(ALL)
    for name, rows in RECORDED.items():
        runs = {(row.seed, row.control) for row in rows}
        controls = [False] if name in WITHOUT_CONTROL else [False, True]
        assert runs == {(seed, control) for seed in range(5) for control in controls}


def test_the_matrix():
    """95 % of the cases, every pair and every control; docs/profile_matrix.md shows it."""
    text, enough = matrix(RECORDED, ALL)
    assert enough, text
    assert text in (ROOT / "docs/profile_matrix.md").read_text()


@pytest.mark.parametrize("name", ALL)
def test_a_matrix_can_fail(name, tmp_path):
    """The evidence of another case in a case's place is not right."""
    other = "compute" if name not in ("compute", "noise") else "bandwidth"
    wrong = next(row for row in RECORDED[other] if not row.control)
    assert not right(ALL[name], Row(wrong.seed, False, wrong.evidence))[0]
    save(tmp_path, name, [Row(wrong.seed, False, wrong.evidence)])
    assert not matrix(load(tmp_path), ALL)[1]
