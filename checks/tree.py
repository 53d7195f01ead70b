"""Copies the sources to a separate tree, and builds and tests it.

The working tree stays unchanged. The copy stays under build/, so that the next run compiles only
changed files.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusedops.building import INSTRUCTION_SETS
from fusedops.extension import _C

ROOT = Path(__file__).parents[1]
COPIED = (
    "csrc",
    "fusedops",
    "tests",
    "benchmarks",
    "checks",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


class Tree:
    """A copy of the sources in `folder`, with its own build.

    preload: libraries that the tests must load first. python: the interpreter, by default this
    one. environment: variables to add to the caller's.
    """

    def __init__(
        self,
        folder: Path,
        preload: Sequence[str] = (),
        python: str = sys.executable,
        **environment: str,
    ) -> None:
        self.folder, self.preload, self.python = folder, preload, python
        build_variables = {
            "FUSEDOPS_CUDA": "0",
            "FUSEDOPS_REQUIRE": "compiled",
            "FUSEDOPS_SIMT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(folder),
            "TRITON_INTERPRET": "1",
        }
        self.environment = os.environ | build_variables | environment

    def sync(self) -> None:
        """Updates the copy. Unchanged files keep their times and object files."""
        sources = {path.relative_to(ROOT): path.read_bytes() for path in _sources(ROOT)}
        for path in _sources(self.folder):
            if path.relative_to(self.folder) not in sources:
                path.unlink()
        for name, content in sources.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def build(self) -> None:
        """Builds everything. Prints the compiler's output and exits if it fails."""
        try:
            self._run([self.python, "setup.py", "build_ext", "--inplace"])
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.stdout) from error

    def rebuild(self) -> None:
        """Rebuilds what changed since `build`, for this machine's instruction set only.

        Raises CalledProcessError if it does not compile.
        """
        work = self.folder / "build" / "temp"
        self._run(["ninja", "-C", str(work), *used_here(objects(work), _C.cpu_isa().upper())])
        library = next((self.folder / "fusedops").glob("_C_torch*.so"))
        command = ["ninja", "-C", str(work), "-t", "commands", "-s", str(work / library.name)]
        self._run(shlex.split(self._run(command).stdout.splitlines()[-1]))
        shutil.copy2(work / library.name, library)

    def pytest(self, selection: str, timeout: float | None = None) -> subprocess.CompletedProcess:
        """Runs the tests that a command line selects, until the first failure.

        It may begin with environment variables, NAME=value.
        """
        words = shlex.split(selection)
        variables = [*itertools.takewhile(re.compile(r"[A-Z_]+=").match, words)]
        command = ["env", *variables, self.python, "-m", "pytest", "-x", "-q"]
        command += ["-p", "no:cacheprovider", *words[len(variables) :]]
        return self._run(command, False, timeout, tuple(self.preload))

    def _run(
        self,
        command: list[str],
        check: bool = True,
        timeout: float | None = None,
        preload: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | ({"LD_PRELOAD": ":".join(preload)} if preload else {}),
            check=check,
            timeout=timeout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _sources(root: Path) -> Iterator[Path]:
    for name in COPIED:
        path = root / name
        files = [path] if path.is_file() else path.rglob("*")
        yield from filter(_is_source, files)


def _is_source(path: Path) -> bool:
    generated = path.suffix == ".pyc" or path.name.startswith("_C_torch")
    return path.is_file() and not generated


def used_here(compiled: Sequence[str], isa: str) -> list[str]:
    """The object files that a CPU with this instruction set runs.

    Files without bfloat16 instructions have no object for AVX512_BF16; there the AVX512 one runs.
    """
    others = {f".{name}.o" for name in INSTRUCTION_SETS if name != isa}
    lower = ".AVX512.o" if isa == "AVX512_BF16" else ""
    return [
        name
        for name in compiled
        if (suffix := f".{name.rsplit('.', 2)[-2]}.o") not in others
        or (suffix == lower and name.replace(suffix, f".{isa}.o") not in compiled)
    ]


def objects(work: Path) -> list[str]:
    """Returns a build's object files, from its ninja file."""
    return re.findall(r"^build (\S+\.o):", (work / "build.ninja").read_text(), re.M)
