"""A copy of the sources that is built and tested apart: nothing in the developer's tree is touched.

It stays under build/, so that the next run compiles only what has changed.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fusedops.extension import _C

ROOT = Path(__file__).parents[1]
COPIED = (
    "csrc",
    "fusedops",
    "tests",
    "benchmarks",
    ".ci",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
MADE = (".so", ".pyc", "_build_info.json")
INSTRUCTION_SETS = {"AVX2", "AVX512", "AVX512_BF16"}


class Tree:
    """A copy of the sources in `folder`, with a build of its own.

    preload: libraries that the tests need before all others. environment: beside the caller's.
    """

    def __init__(self, folder: Path, preload: Sequence[str] = (), **environment: str) -> None:
        self.folder, self.preload = folder, preload
        own = {
            "DIST_EXTRA_CONFIG": str(folder / ".ci" / "build.cfg"),
            "FUSEDOPS_CUDA": "0",
            "FUSEDOPS_SIMT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(folder),
            "TRITON_INTERPRET": "1",
        }
        self.environment = os.environ | own | environment

    def sync(self) -> None:
        """Make the copy what the sources are. What is the same keeps its time and its object."""
        wanted = {path.relative_to(ROOT): path.read_bytes() for path in _sources(ROOT)}
        for path in _sources(self.folder):
            if path.relative_to(self.folder) not in wanted:
                path.unlink()
        for name, content in wanted.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def build(self) -> None:
        """All of it. Prints what the compiler says and exits where it fails."""
        try:
            self._run([sys.executable, "setup.py", "build_ext", "--inplace"])
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.stdout) from error

    def rebuild(self) -> None:
        """What has changed since `build`, for the instruction set of this machine alone.

        Raises CalledProcessError where it does not compile.
        """
        made = self.folder / "build" / "temp"
        others = INSTRUCTION_SETS - {_C.cpu_isa().upper()}
        mine = [o for o in (made / "objects").glob("*.o") if o.stem.split(".")[-1] not in others]
        self._run(["ninja", "-C", str(made / "objects"), *map(str, mine)])
        self._run(["ninja", "-C", str(made)])
        self._link(made)

    def _link(self, made: Path) -> None:
        extension = next((self.folder / "fusedops").glob("_C*.so"))
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
        libraries += ["-ltorch_python", "-fopenmp"]
        if sanitizers := self.environment.get("FUSEDOPS_SANITIZE"):
            libraries.append(f"-fsanitize={sanitizers}")
        objects = sorted(map(str, made.rglob("*.o")))
        self._run(["g++", "-shared", *objects, *libraries, "-o", str(extension)])

    def pytest(self, selection: str, timeout: float | None = None) -> subprocess.CompletedProcess:
        """Run the tests that a command line selects, until the first failure."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        return self._run([*command, *shlex.split(selection)], False, timeout, tuple(self.preload))

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
        found = [path] if path.is_file() else path.rglob("*")
        yield from (p for p in found if p.is_file() and not p.name.endswith(MADE))
