"""Records which versions passed the tests, and writes docs/compatibility.md.

`python -m checks torches` adds rows for compiled sources, `quick-record` and `wheel-check` add rows
for the quick tests, and `wheel` describes the wheel. `compatibility` rewrites docs/compatibility.md
from the JSON; with `--check` it only compares the page.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
Row = dict[str, Any]
VERSIONS = ("torch", "python", "transformers", "kernels", "cpu")  # identify a quick run's row

# The tested interpreter runs this. It may have neither this package's checks nor numpy.
ABOUT = """
import json, platform, torch, fusedops
from fusedops.backends import cpu_name, unavailable, version_of
from fusedops.extension import _C
compiled = unavailable("linear", "cpu") is None
about = {
    "torch": torch.__version__,
    "python": platform.python_version(),
    "transformers": version_of("transformers"),
    "kernels": _C.cpu_isa() if compiled else None,
    "cpu": cpu_name(),
}
print(json.dumps(about))
"""

HEAD = """\
# Versions that passed

`python -m checks compatibility` writes this page from `compatibility.json`.
"""
QUICK = """\
## Quick tests

`pytest -m quick` with an installed package: every family forward and backward, an optimizer, a
patched model, quantized layers, and `torch.compile` of one family. The column "kernels" shows the
instruction set of the compiled part; "none" means that PyTorch's own operators ran.
`python -m checks quick-record` adds rows.
"""
COMPILED = """\
## Compiled

Every source is compiled against a torch's headers, once for each instruction set.
`make torch-check` adds rows.
"""
WHEEL = """\
## The wheel

`make wheel` built `{file}` on {date}. It took {cpu_minutes} minutes of CPU time on an {cpu}.

- It contains one library each for torch {torches}. All libraries link the same kernels. The wheel
  does not contain torch's own libraries and OpenMP.
- The file has {megabytes} MB, and {installed_megabytes} MB when installed.
- The tag is the lowest that auditwheel grants. These symbols from the system's libraries are newer
  than manylinux_2_28: {blocking}.

`make wheel-check` installs the wheel with two versions of torch, and adds rows to the quick tests.
`pyproject.toml` also configures manylinux_2_28 and Python 3.12 to 3.14 for cibuildwheel; these
wheels have not been built.
"""


def load(path: Path = RESULTS) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def save(results: dict[str, Any], path: Path = RESULTS, page: Path = PAGE) -> None:
    """Writes the results and their page."""
    path.write_text(json.dumps(results, indent=2) + "\n")
    page.write_text(rendered(results))


def with_quick(results: dict[str, Any], row: Row) -> dict[str, Any]:
    """The results with a new row of the quick tests; it replaces a row for the same versions."""
    kept = [old for old in results.get("quick", []) if _versions(old) != _versions(row)]
    return results | {"quick": sorted([*kept, row], key=_order)}


def _versions(row: Row) -> list:
    return [row[name] for name in VERSIONS]


def _order(row: Row) -> tuple:
    parts = (_numbers(row["torch"]), _numbers(row["python"]), _numbers(row["transformers"] or ""))
    return (*parts, row["torch"], row["kernels"] or "", row["cpu"])


def _numbers(version: str) -> list[int]:
    plain = version.partition("+")[0].split(".")
    return [int(part) for part in plain if part.isdigit()]


def rendered(results: dict[str, Any]) -> str:
    """Returns the page, newest versions first."""
    tables = []
    if results.get("quick"):
        tables.append(QUICK + "\n" + _table(*_quick(reversed(results["quick"]))))
    if results.get("compiled"):
        tables.append(COMPILED + "\n" + _table(*_compiled(results["compiled"])))
    if results.get("wheel"):
        tables.append(_wheel(results["wheel"]))
    return "\n".join([HEAD, *tables])


def _wheel(row: Row) -> str:
    return WHEEL.format(
        **row | {"torches": ", ".join(row["torches"]), "blocking": _names(row["blocking"])}
    )


def _table(head: str, *rows: str) -> str:
    rule = " | ".join("---" for _ in head.split(" | "))
    return "".join(f"| {line} |\n" for line in (head, rule, *rows))


def _quick(rows: Iterable[Row]) -> Iterator[str]:
    yield "torch | Python | transformers | kernels | CPU | passed | skipped | failed | date"
    for row in rows:
        versions = (row["torch"], row["python"], row["transformers"] or "none")
        counts = (str(row["passed"]), str(row["skipped"]), _names(row["failed"]))
        yield " | ".join([*versions, row["kernels"] or "none", row["cpu"], *counts, row["date"]])


def _compiled(by_torch: dict[str, Row]) -> Iterator[str]:
    yield "torch | compilers | sources | failed | date"
    for torch in sorted(by_torch, key=_numbers, reverse=True):
        row = by_torch[torch]
        compilers = ", ".join(row["compilers"])
        yield f"{torch} | {compilers} | {row['units']} | {_names(row['failed'])} | {row['date']}"


def _names(failed: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in failed) or "none"


def quick_row(python: str, tests: Path = ROOT / "tests") -> Row:
    """Runs the quick tests in another interpreter, and returns the row with their results.

    They run in an empty folder, so that they import the installed package and not this checkout.
    Raises RuntimeError if the package cannot be imported or no test passed.
    """
    with tempfile.TemporaryDirectory() as empty:
        about = _run([python, "-c", ABOUT], empty)
        if about.returncode:
            raise RuntimeError(f"{python} cannot import fusedops:\n{about.stderr}")
        report = Path(empty) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-m", "quick", "-p", "no:cacheprovider"]
        run = _run([*command, f"--rootdir={ROOT}", f"--junitxml={report}", str(tests)], empty)
        print(run.stdout, end="")
        counts = counted(report.read_text()) if report.exists() else {}
    if not counts.get("passed"):
        raise RuntimeError(f"no quick test passed in {python}:\n{run.stdout}{run.stderr}")
    date = datetime.date.today().isoformat()
    return {**json.loads(about.stdout.splitlines()[-1]), "date": date, **counts}


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True)


def counted(junit: str) -> Row:
    """Returns the numbers of passed and skipped tests, and the names of the failed ones."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failed = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="compare the page, write nothing")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if `--check` is set and the page is stale."""
    page = rendered(load())
    if not args.check:
        PAGE.write_text(page)
        return 0
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: run `python -m checks compatibility`")
    return 1


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter to test (default: this one)"
    )


def record(args: argparse.Namespace) -> int:
    """Runs the quick tests and adds the row. Returns the exit status: 1 if a test failed."""
    row = quick_row(args.python)
    save(with_quick(load(), row))
    print(f"torch {row['torch']}: {row['passed']} passed, {len(row['failed'])} failed")
    return int(bool(row["failed"]))
