"""Hashes the source files behind a benchmark result, so that pages can mark outdated results.

A result file stores a hash per unit: an operator family, a folder of fusedops, or the benchmark
itself. Comments, docstrings and blank lines do not count: rewording one does not age a figure. A
family's unit follows `#include`, so that a shared header counts where it is used.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from benchmarks import FAMILIES, ON_GPU, WORKLOADS
from fusedops.backends import cpu_name

ROOT = Path(__file__).parents[2]
LENGTH = 16  # hexadecimal digits of a unit's hash

# Where a family's files are, by the device that runs them.
FLOORS = {
    "cpu": ("csrc/ops", "csrc/python", "csrc/cpu", "csrc/cpu/isa"),
    "cuda": ("csrc/ops", "csrc/python", "csrc/cuda", "fusedops/triton"),
}
SHARED = ("csrc/kernels", "fusedops/functional", "fusedops/nn", "fusedops/optim")

# Units that are folders.
FOLDERS = {name: f"fusedops/{name}" for name in ("patching", "profiling", "sweeping", "tuning")}
FOLDERS["demo"] = "fusedops/demo"

# A suite's units, if they are not its one family.
UNITS = {
    "adamw-loss": ("adamw",),
    "few-rows": ("linear", "quantized_linear"),
    "demo": (*ON_GPU, "patching", "demo"),
    "sweep": (*ON_GPU, "patching", "sweeping"),
    "sweep-memory": (*ON_GPU, "patching", "sweeping"),
    "tune": (*ON_GPU, "patching", "tuning"),
    "profile": (*ON_GPU, "patching", "profiling"),
}
SEVERAL = ("must-show", "launch")  # suites of several families
MODELS = (*ON_GPU, "patching")  # suites that run a patched model

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CODE = {".py", ".cpp", ".h", ".cu", ".cuh"}
INCLUDE = re.compile(rb'^\s*#include "([^"]+)"', re.MULTILINE)

# A string is matched first, so that a `//` within it is not taken for a comment.
_CPP = re.compile(
    r'R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)


def stamp(suite: str, families: Iterable[str] = (), device: str = "cpu") -> dict:
    """Returns the CPU and the units' hashes, for a result file's environment.

    families: what a suite of several families measured; all by default.
    """
    units = units_of(suite, families)
    suites = units if suite in SEVERAL else (suite,)
    units += tuple(f"benchmark {one}" for one in suites if one != "demo")
    return {"cpu": cpu(), "sources": {unit: digest(unit, device) for unit in units}}


def units_of(suite: str, families: Iterable[str] = ()) -> tuple[str, ...]:
    if suite in SEVERAL:
        return tuple(families) or FAMILIES
    return (suite,) if suite in ON_GPU else UNITS.get(suite, MODELS)


def changed(found: dict[str, str], device: str = "cpu") -> list[str]:
    """Returns the units whose sources have changed since a result file stored their hashes."""
    return [unit for unit, was in found.items() if digest(unit, device) != was]


def cpu() -> str:
    """This machine's CPU: cloud machines with one model name can have different CPUs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    known = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    numbers = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
    return ", ".join([cpu_name(), *(f"{n} {known[key]}" for n, key in numbers if key in known)])


@cache
def digest(unit: str, device: str = "cpu", root: Path = ROOT) -> str:
    """Returns the hash of a unit's sources, in hexadecimal; of nothing if it has no files."""
    total = hashlib.sha256()
    for path in sorted(files(unit, device, root)):
        total.update(f"{path.relative_to(root)}\n{stripped(path)}\n".encode())
    return total.hexdigest()[:LENGTH]


def files(unit: str, device: str = "cpu", root: Path = ROOT) -> set[Path]:
    """Returns a unit's source files. A unit that is unknown here has none."""
    kind, _, suite = unit.rpartition(" ")
    if kind == "benchmark":
        return set(_benchmark(suite, root))
    if unit in FOLDERS:
        return set(_below(root / FOLDERS[unit]))
    named = {path for floor in (*FLOORS[device], *SHARED) for path in _of(root / floor, unit)}
    return with_included(named, root)


def with_included(named: set[Path], root: Path) -> set[Path]:
    """Adds the files of the tree that these include, and each such header's source."""
    found, todo = set(), list(named)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        included = [root / name.decode() for name in INCLUDE.findall(path.read_bytes())]
        todo += [one for header in included for one in _with_source(header) if one.exists()]
    return found


def _with_source(header: Path) -> tuple[Path, ...]:
    return header, header.with_suffix(".cpp")


def _benchmark(suite: str, root: Path) -> Iterator[Path]:
    """The files that define what a suite measures."""
    module = WORKLOADS.get(suite, f"benchmarks.operators.{suite}")
    module = "benchmarks.bottlenecks" if suite == "profile" else module
    path = root / module.replace(".", "/")
    return _below(path.parent) if path.parent.name in ON_GPU else _of(path.parent, path.name)


def _of(folder: Path, name: str) -> Iterator[Path]:
    yield from (path for path in folder.glob(f"{name}.*") if path.suffix in CODE)
    yield from _below(folder / name)


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in CODE)


def stripped(path: Path) -> str:
    """Returns a source without comments, docstrings, blank lines and trailing spaces."""
    text = path.read_text()
    text = _python(text) if path.suffix == ".py" else _CPP.sub(_kept, text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _kept(match: re.Match) -> str:
    return " " if match["comment"] else match[0]


def _python(text: str) -> str:
    """Replaces docstrings and comments by nothing; the rest stays as it is written."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            if first.lineno > getattr(node, "lineno", 0):  # not on the line of its `def`
                lines[first.lineno - 1 : first.end_lineno] = ["\n"] * _height(first)
    return "".join(_without_comments(lines))


def _height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _without_comments(lines: list[str]) -> Iterator[str]:
    cut: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            cut[token.start[0] - 1] = token.start[1]
    for i, line in enumerate(lines):
        yield f"{line[: cut[i]]}\n" if i in cut else line
