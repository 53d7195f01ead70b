"""Runs transformers' tests, unpatched and patched: `python -m checks transformers-tests`.

The tests are the installed transformers': its source distribution on PyPI has the methods that
every model must pass, but not the single models' testers, which `models.py` replaces. Generation
and export tests are not in the distribution.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.transformers_tests import parallel
from checks.tree import ROOT

WORK = ROOT / "build" / "transformers-tests"
PACKAGE = "transformers_suite"  # `tests` is ours
MODELS = ("llama", "bert", "t5", "vit", "whisper")
TESTS = (
    "test_attention_outputs",
    "test_can_set_attention_dynamically",
    "test_sdpa_can_dispatch_non_composite_models",
)
# Files that the tests import but the distribution lacks, with the imported class.
ABSENT = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}
OURS = Path(__file__).with_name("models.py")


@dataclass(frozen=True)
class Run:
    """The plugin's results. outcomes: each test's `outcome`, `subtests` and `said`."""

    outcomes: dict[str, dict[str, Any]]
    models: int = 0
    sites: dict[str, int] | None = None

    def counts(self) -> str:
        outcomes = Counter(test["outcome"] for test in self.outcomes.values())
        return ", ".join(f"{outcomes[name]} {name}" for name in ("passed", "failed", "skipped"))

    def of(self, test: str) -> str:
        """Returns a test's outcome, with its subtests', in words."""
        outcome = self.outcomes.get(test)
        if outcome is None:
            return "absent"
        counts = [f"{count} {name}" for name, count in sorted(outcome["subtests"].items())]
        return outcome["outcome"] + (f" (subtests: {', '.join(counts)})" if counts else "")

    def said(self, test: str) -> str:
        return self.outcomes.get(test, {}).get("said", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS, metavar="TYPE", help="such as llama")
    add("-k", dest="tests", default=" or ".join(f"({name} and not {name}_)" for name in TESTS),
        help="which tests, as pytest's -k; '' for all")  # fmt: skip
    add("--parallel", action="store_true", help="the tests of tensor parallelism and FSDP2")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if an outcome differs, nothing passed or nothing was patched."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = unpacked(importlib.metadata.version("transformers"))
    if args.parallel:
        return parallel.run(path)
    tests = [f"{OURS}::{model}" for model in args.models]
    plain, patched = (pytest(path, tests, args.tests, patch) for patch in (False, True))
    print(f"unpatched: {plain.counts()}")
    print(f"patched: {patched.counts()}; {patched.models} models, sites {patched.sites}")
    wrong = list(complaints(plain, patched))
    print(*wrong or ["every outcome is the same"], sep="\n")
    return int(bool(wrong))


def complaints(plain: Run, patched: Run) -> Iterator[str]:
    """Yields the tests whose outcome differs, and whatever invalidates the comparison."""
    if not any(test["outcome"] == "passed" for test in plain.outcomes.values()):
        yield "no test passed without patch"
    if not patched.models:
        yield "no model was patched"
    for test in sorted(plain.outcomes.keys() | patched.outcomes.keys()):
        if plain.of(test) != patched.of(test):
            said = patched.said(test) or plain.said(test)
            yield f"{test}: {plain.of(test)} unpatched, {patched.of(test)} patched: {said}"


def pytest(path: Path, tests: list[str], selection: str, patch: bool) -> Run:
    """Runs the tests in their own process. Fused sites run their kernels at every size."""
    file = WORK / ("patched.json" if patch else "unpatched.json")
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-p", "checks.transformers_tests.plugin", "-c", os.devnull, "--rootdir", str(path)]
    command += ["--outcomes", str(file), "-W", "ignore", *(["-k", selection] if selection else [])]
    command += ["--patch-models"] if patch else []
    paths = [path, ROOT, WORK / "packages", *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    variables |= {"FUSEDOPS_FUSE": "always"} if patch else {}
    ended = subprocess.run([*command, *tests], cwd=WORK, env=os.environ | variables)
    if ended.returncode not in (0, 1) or not file.exists():
        raise SystemExit(f"pytest ended with {ended.returncode}")
    return Run(**json.loads(file.read_text()))


def unpacked(version: str) -> Path:
    """Returns the folder with a transformers' tests, from its source distribution, as PACKAGE."""
    _need_parameterized()
    folder = WORK / version
    if not (folder / "complete").exists():
        with tempfile.TemporaryDirectory(dir=WORK) as downloads:
            download = ["download", "--no-deps", "--no-binary=transformers", "--dest", downloads]
            _pip(*download, f"transformers=={version}")
            unpack(next(Path(downloads).glob("transformers-*.tar.gz")), folder / PACKAGE)
        (folder / "complete").touch()
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks the archive's tests into a folder, with empty classes for missing ones."""
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            _, *inside = member.name.split("/")
            if inside[:1] == ["tests"] and member.isfile():
                member.name = "/".join(inside[1:])
                source.extract(member, folder, filter="data")
    for name, mixin in ABSENT.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"class {mixin}:\n    pass\n")


def _need_parameterized() -> None:
    """Installs `parameterized`, which only transformers' tests import, if it is missing."""
    packages = WORK / "packages"
    installed = importlib.util.find_spec("parameterized") or (packages / "parameterized").exists()
    if not installed:
        _pip("install", "--no-deps", "--target", packages, "parameterized")


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True)
