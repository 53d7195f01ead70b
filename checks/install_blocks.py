"""Runs README's and quickstart's install commands as a new user: `python -m checks install-blocks`.

Each block runs in an empty virtual environment with an empty home folder, line by line and word for
word. Two things are replaced: `.` in `pip install ".[hf]"` by a package of dist/, and, with
`--pypi`, torch's own package index by pip's usual one. Then the page's first Python block runs; its
report must have come from compiled kernels.

The command prints the time of each line. The sum from the install block's first line to the
program's end, without torch's download, has a limit: LIMITS.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PAGES = ("README.md", "docs/quickstart.md")
HERE = '".[hf]"'  # what a block installs in a clone
TORCH_INDEX = " --index-url https://download.pytorch.org/whl/cpu"
LIMITS = {"source": 360.0, "wheel": 60.0}  # seconds
# Of the caller's variables only these: PATH is the environment's bin/ and the system's.
KEPT = re.compile(r"PIP_|SSL_|REQUESTS_CA|CURL_CA|HTTPS?_PROXY|NO_PROXY|LANG|LC_", re.I)


def install_blocks(page: str) -> list[list[str]]:
    """Returns the lines of each console block that begins with pip, in the section "Install"."""
    section = re.search(r"^## Install\n(.*?)^## ", page, re.S | re.M)
    if section is None:
        raise ValueError('the page has no section "## Install"')
    blocks = re.findall(r"^```console\n(.*?)^```$", section[1], re.S | re.M)
    return [block.splitlines() for block in blocks if block.startswith("pip ")]


def first_program(page: str) -> str:
    """Returns the page's first Python block."""
    block = re.search(r"^```python\n(.*?)^```$", page, re.S | re.M)
    if block is None:
        raise ValueError("the page has no Python block")
    return block[1]


def from_dist(line: str, dist: Path, pypi: bool) -> str:
    """Replaces the sources of packages in a line; nothing else changes."""
    if HERE in line:
        line = line.replace(HERE, f'"{only(dist, "fusedops-[0-9]*.tar.gz")}[hf]"')
    return line.replace(TORCH_INDEX, "") if pypi else line


def only(folder: Path, pattern: str) -> Path:
    paths = [*folder.glob(pattern)]
    if len(paths) != 1:
        raise SystemExit(f"{folder} must have one {pattern}, not {len(paths)}: run `make release`")
    return paths[0]


class Newcomer:
    """An empty environment and an empty home folder, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        venv.create(folder / "venv", with_pip=True)
        kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
        path = f"{folder / 'venv' / 'bin'}:/usr/bin:/bin"
        self.environment = kept | {"HOME": str(self.home), "PATH": path}

    def run(self, command: list[str], cwd: Path) -> tuple[float, str]:
        """Returns a command's seconds and output. Raises SystemExit with its output if it fails."""
        begun = time.perf_counter()
        run = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode:
            raise SystemExit(f"{command[-1]}\nfailed with status {run.returncode}:\n{run.stdout}")
        return time.perf_counter() - begun, run.stdout

    def line(self, line: str) -> float:
        """Runs a line of a block in the root of this checkout, where `dist/` is."""
        seconds, printed = self.run(["bash", "-c", line], ROOT)
        if "without its compiled part" in printed or "not compiled" in printed:
            raise SystemExit(f"{line}\nleft fusedops without kernels:\n{printed}")
        return seconds

    def program(self, text: str) -> float:
        """Runs a page's program in an empty folder. A warning of fusedops is a failure."""
        empty = self.folder / "empty"
        empty.mkdir()
        (empty / "start.py").write_text(text)
        seconds, printed = self.run(["python", "start.py"], empty)
        if "fusedops.patch  norm:" not in printed or "no compiled part" in printed:
            raise SystemExit(f"the program printed no report of fused sites:\n{printed}")
        return seconds


def tried(page: str, block: list[str], pypi: bool) -> tuple[str, float]:
    """Runs a block and the page's program; returns what was installed and the seconds it took."""
    text = (ROOT / page).read_text()
    kind = "source" if any(HERE in line for line in block) else "wheel"
    with tempfile.TemporaryDirectory() as folder:
        newcomer, total = Newcomer(Path(folder)), 0.0
        for line in block:
            took = _line(newcomer, line, pypi)
            print(f"  {took:6.1f} s  {line}", flush=True)
            total += took
        took = newcomer.program(first_program(text))
        print(f"  {took:6.1f} s  python start.py  # the page's first block", flush=True)
    return kind, total + took


def _line(newcomer: Newcomer, written: str, pypi: bool) -> float:
    line = from_dist(written, DIST, pypi)
    if line.startswith("pip install torch=="):  # its download is not counted
        folder = newcomer.folder / "torch"
        newcomer.line(line.replace("pip install", f"pip download --no-deps --dest {folder}"))
        line += f" --find-links {folder}"
    return newcomer.line(line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pypi", action="store_true", help="take torch from pip's usual index")
    parser.add_argument("--page", action="append", choices=PAGES, help="one page; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if an installation took longer than its limit; raises SystemExit if one failed."""
    slow = False
    for page in args.page or PAGES:
        for block in install_blocks((ROOT / page).read_text()):
            print(f"{page}, its {len(block)} lines:", flush=True)
            kind, total = tried(page, block, args.pypi)
            slow |= total > LIMITS[kind]
            print(f"  {total:6.1f} s  from the {kind}; at most {LIMITS[kind]:.0f} s", flush=True)
    if slow:
        print("an installation took longer than its limit", file=sys.stderr)
    return int(slow)
