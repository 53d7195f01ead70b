"""Finds result files, and tells their machine, date, commit and whether they are outdated."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.harness import sources
from fusedops.backends import cpu_name

__all__ = [
    "PREFERRED",
    "RESULTS",
    "WARNING",
    "FigureError",
    "Result",
    "find",
    "folder_here",
    "folder_of",
]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PREFERRED = "intel-xeon-family-6-model-207"  # shown where several machines have a result
WARNING = "measured before today's sources"  # of a stale result


class FigureError(Exception):
    """A figure cannot be rendered; the message says which one and why."""


@dataclass(frozen=True)
class Result:
    """One result file."""

    path: Path

    @cached_property
    def document(self) -> dict:
        return json.loads(self.path.read_text())

    @property
    def name(self) -> str:
        """`intel-xeon/adamw`"""
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def where(self) -> dict:
        """The environment; the demo has its keys beside its results."""
        return self.document.get("environment", self.document)

    @property
    def stale(self) -> bool:
        """Whether the sources have changed since the measurement, or were not recorded."""
        found = self.where.get("sources")
        return not found or bool(sources.changed(found))

    @property
    def machine(self) -> str:
        """Device, threads and versions."""
        w = self.where
        threads = f"{w['threads']} thread" + "s" * (w["threads"] > 1)
        versions = f"torch {w['torch']}, transformers {w['transformers']}"
        return f"{w.get('cpu', w['device'])}, {threads}, {versions}"

    @property
    def date(self) -> str:
        return self.where["date"][:10]

    @property
    def commit(self) -> str:
        return self.where["commit"] or "unknown"


def find(stems: tuple[str, ...], results: Path = RESULTS) -> list[Result]:
    """Returns the files of these names: the PREFERRED machine's first, then the others'.

    Each machine gives its first name that exists. Raises FigureError if there is none.
    """
    folders = sorted(p for p in results.glob("*") if p.is_dir())
    folders.sort(key=lambda folder: folder.name != PREFERRED)
    every = [[folder / f"{stem}.json" for stem in stems] for folder in folders]
    firsts = [next((path for path in paths if path.exists()), None) for paths in every]
    found = [path for path in firsts if path]
    if not found:
        names = " or ".join(f"{stem}.json" for stem in stems)
        raise FigureError(f"no result file {names} in a folder of {results}: measure it first")
    return [Result(path) for path in found]


def folder_here(results: Path = RESULTS) -> Path:
    """This CPU's folder, with its numbers if the plain one has another CPU of the same name."""
    plain, cpu = results / folder_of(cpu_name()), sources.cpu()
    known = [Result(path).where.get("cpu") for path in plain.glob("*.json")]
    if cpu in known or not known:
        return plain
    return results / folder_of(cpu.partition(", stepping")[0])


def folder_of(device: str) -> str:
    """A CPU's folder of results: `Intel(R) Xeon(R) Processor` has intel-xeon."""
    words = re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@.*", " ", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")
