"""Tests `make asan`: its options and suppressions."""

from checks.sanitize import FILES, SUPPRESSIONS, sanitized
from checks.tree import ROOT


def test_leaks_and_odr_violations_are_looked_for():
    environment = sanitized().environment
    assert environment["ASAN_OPTIONS"].startswith("detect_leaks=1:detect_odr_violation=2:")
    assert str(SUPPRESSIONS) in environment["LSAN_OPTIONS"]
    assert ROOT / "tests" / "growth" / "test_growth.py" in FILES


def test_suppressions_hide_no_caller_of_ours():
    """A suppression hides every leak that has its name in any stack frame."""
    lines = [line for line in SUPPRESSIONS.read_text().splitlines() if line[:1] not in ("", "#")]
    assert lines and all(line.startswith("leak:") for line in lines)
    names = [line.removeprefix("leak:") for line in lines]
    everywhere = "fusedops", "torch", "c10", "at::", "operator new", "malloc", "python"
    assert not [name for name in names if any(part in name for part in everywhere)]
