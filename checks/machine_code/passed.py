"""Records which kernels' machine code passed the checks, so that tests compile only what changed.

`python -m checks machine-code --write` compiles everything and records a digest for each CUDA
source and each family of Triton kernels that passed. A digest covers what the machine code and its
judgement depend on: the compiler's version, the kernels with all that they include or import, and
the checks' code. Comments and docstrings do not count.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from checks.machine_code import ROOT, nvcc

__all__ = ["RECORD", "cuda_digest", "is_recorded", "record", "triton_digest"]

RECORD = ROOT / "checks" / "machine_code" / "passed.json"
GATES = Path("checks", "machine_code")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
JUDGES = GATES / "__init__.py", *(GATES / f"{name}.py" for name in ("gates", "sass"))


def cuda_digest(source: Path) -> str:
    """Returns the digest of a CUDA source's kernels for the installed nvcc. source: below ROOT."""
    gates = [*JUDGES, GATES / "nvcc.py", *_below(GATES / "cuda", ".py")]
    return _digest(
        " ".join([nvcc.version(), *nvcc.flags()]), {*_closure([_relative(source)]), *gates}
    )


def triton_digest(family: str, version: str) -> str:
    """Returns the digest of a family's Triton kernels and of the code that chooses their launches.

    family: one of launches.FAMILIES. version: of Triton.
    """
    name = family.rpartition(".")[2]
    gates = [*JUDGES, GATES / "launches.py", GATES / f"{name}.py"]
    choices = [*_below(Path("csrc", "ops", name), ".h", ".cpp"), *(ROOT / "csrc/ops").glob("*.*")]
    kernels = _closure(_below(Path("fusedops", "triton", name), ".py"))
    return _digest(f"triton {version}", {*kernels, *gates, *map(_relative, choices)})


def is_recorded(digest: str) -> bool:
    return any(digest in digests.values() for digests in json.loads(RECORD.read_text()).values())


def record(passing: Mapping[str, Iterable[str]]) -> None:
    """Writes RECORD. passing: each compiler's CUDA sources or families that passed the gates."""
    digests = {
        compiler: {unit: _digest_of(compiler, unit) for unit in units}
        for compiler, units in passing.items()
    }
    RECORD.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


def _digest_of(compiler: str, unit: str) -> str:
    if compiler.startswith("triton "):
        return triton_digest(unit, compiler.removeprefix("triton "))
    return cuda_digest(ROOT / unit)


def _digest(compiler: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(compiler.encode())
    for path in sorted(files):
        digest.update(f"\0{path}\0{_code(path)}".encode())
    return digest.hexdigest()[:24]


def _code(path: Path) -> str:
    """Returns a file's code without comments, docstrings and line breaks."""
    text = (ROOT / path).read_text()
    if path.suffix != ".py":
        return " ".join(re.sub(r"//.*|/\*(?s:.*?)\*/", "", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def _closure(files: Iterable[Path]) -> set[Path]:
    """Returns the files, and all of fusedops' files that they include or import."""
    closure: set[Path] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path not in closure and (ROOT / path).is_file():
            closure.add(path)
            waiting += _imported(path) if path.suffix == ".py" else _included(path)
    return closure


def _included(path: Path) -> list[Path]:
    names = re.findall(r'^#include "(csrc/\S+)"', (ROOT / path).read_text(), re.MULTILINE)
    return [Path(name) for name in names]


def _imported(path: Path) -> Iterator[Path]:
    """Yields the possible paths of the Triton kernel modules that a module imports."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                if name.startswith("fusedops.triton"):
                    module = Path(*name.split("."))
                    yield from (module.with_suffix(".py"), module / "__init__.py")


def _below(folder: Path, *suffixes: str) -> list[Path]:
    return [_relative(path) for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]


def _relative(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_absolute() else path
