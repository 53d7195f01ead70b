"""docs/compatibility.md is up to date, and runs of the quick tests become its rows."""

import json
import sys

import pytest
import torch

from checks import __main__ as command_line
from checks import compatibility
from checks.compatibility import counted, load, quick_row, rendered, save, with_quick

ROW = {
    "torch": "2.13.0+cpu",
    "python": "3.12.4",
    "transformers": "5.17.0",
    "kernels": "avx2",
    "cpu": "AMD EPYC",
    "date": "2026-11-24",
    "passed": 43,
    "skipped": 0,
    "failed": [],
}
JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
<testcase classname="test_quick" name="test_one" time="0.1"/>
<testcase classname="test_quick" name="test_two[float32]"><failure message="no"/></testcase>
<testcase classname="test_quick" name="test_three"><error message="no">no</error></testcase>
<testcase classname="test_quick" name="test_four"><skipped message="no">no</skipped></testcase>
</testsuite></testsuites>"""


def test_the_page_is_up_to_date():
    assert command_line.main(["compatibility", "--check"]) == 0


def test_a_stale_page_fails(monkeypatch, tmp_path, capsys):
    page = tmp_path / "compatibility.md"
    monkeypatch.setattr(compatibility, "PAGE", page)
    monkeypatch.setattr(compatibility, "ROOT", tmp_path)
    assert command_line.main(["compatibility", "--check"]) == 1
    assert "compatibility.md is stale: run `python -m checks compat" in capsys.readouterr().out
    assert command_line.main(["compatibility"]) == 0
    assert command_line.main(["compatibility", "--check"]) == 0
    page.write_text(page.read_text().replace("2.13.0", "2.13.1"))
    assert command_line.main(["compatibility", "--check"]) == 1


def test_a_row_is_replaced_by_one_of_the_same_versions():
    before = {"compiled": {}, "quick": [ROW]}
    again = ROW | {"passed": 40, "date": "2026-12-01"}
    other = ROW | {"python": "3.11.7"}
    older = ROW | {"torch": "2.9.1", "kernels": None}
    after = with_quick(with_quick(with_quick(before, again), other), older)
    assert after == {"compiled": {}, "quick": [older, other, again]}
    assert before["quick"] == [ROW]


def test_the_page_shows_versions_and_failures(tmp_path):
    failed = ROW | {"transformers": None, "kernels": None, "failed": ["test_one", "test_two"]}
    compiled = {"date": "2026-11-23", "compilers": ["g++ 12.2.0", "nvcc 13.0"], "units": 121}
    results = {
        "quick": [ROW, failed],
        "compiled": {
            "2.9.0": compiled | {"failed": {}},
            "2.11.0": compiled | {"failed": {"a": "b"}},
        },
    }
    save(results, tmp_path / "found.json", tmp_path / "found.md")
    assert load(tmp_path / "found.json") == results
    page = (tmp_path / "found.md").read_text()
    assert page == rendered(results)
    rows = [line for line in page.splitlines() if line.startswith("| 2")]
    assert rows == [
        "| 2.13.0+cpu | 3.12.4 | none | none | AMD EPYC | 43 | 0 | `test_one`, `test_two` "
        "| 2026-11-24 |",
        "| 2.13.0+cpu | 3.12.4 | 5.17.0 | avx2 | AMD EPYC | 43 | 0 | none | 2026-11-24 |",
        "| 2.11.0 | g++ 12.2.0, nvcc 13.0 | 121 | `a` | 2026-11-23 |",
        "| 2.9.0 | g++ 12.2.0, nvcc 13.0 | 121 | none | 2026-11-23 |",
    ]


def test_a_report_is_counted():
    failed = ["test_two[float32]", "test_three"]
    assert counted(JUNIT) == {"passed": 1, "skipped": 1, "failed": failed}


@pytest.fixture
def tests(tmp_path):
    """Returns a folder with a quick test that passes, one that fails, and a file that has none."""
    (tmp_path / "test_few.py").write_text(
        "import pytest\npytestmark = pytest.mark.quick\n"
        "def test_right(): pass\ndef test_wrong(): assert False\n"
    )
    (tmp_path / "test_other.py").write_text("def test_slow(): assert False\n")
    return tmp_path


def test_an_interpreter_becomes_a_row(tests, capsys):
    row = quick_row(sys.executable, tests)
    assert row.keys() == ROW.keys()
    assert row["torch"] == torch.__version__ and row["failed"] == ["test_wrong"]
    assert (row["passed"], row["skipped"]) == (1, 0)
    assert json.loads(json.dumps(row)) == row
    assert "test_wrong" in capsys.readouterr().out


def test_an_interpreter_without_the_package_is_refused(tests, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(RuntimeError, match="cannot import fusedops"):
        quick_row(str(bare), tests)


def test_a_run_without_tests_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="no quick test passed"):
        quick_row(sys.executable, tmp_path)
