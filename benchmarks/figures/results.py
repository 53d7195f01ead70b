"""Finds result files, and tells their machine, date and commit."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.harness import report

__all__ = [
    "PREFERRED",
    "RESULTS",
    "FigureError",
    "Result",
    "find",
    "folder_here",
    "folder_of",
]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PREFERRED = "intel-xeon-family-6-model-207"  # shown where several machines have a result


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
        """`intel-xeon-family-6-model-207/adamw`"""
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def where(self) -> dict:
        """The environment; the demo has its keys beside its results."""
        return self.document.get("environment", self.document)

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


def find(stem: str, results: Path = RESULTS) -> list[Result]:
    """Returns the files of this name: the PREFERRED machine's first, then the others'.

    Raises FigureError if there is none.
    """
    paths = sorted(results.glob(f"*/{stem}.json"))
    paths.sort(key=lambda path: path.parent.name != PREFERRED)
    if not paths:
        raise FigureError(f"no result file {stem}.json in a folder of {results}: measure it first")
    return [Result(path) for path in paths]


def folder_here(results: Path = RESULTS) -> Path:
    """This CPU's folder: it has the CPU's numbers, because a name can mean several CPUs."""
    return results / folder_of(report.cpu().partition(", stepping")[0])


def folder_of(device: str) -> str:
    """A CPU's folder of results: `Intel(R) Xeon(R) Processor` has intel-xeon."""
    words = re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@.*", " ", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")
