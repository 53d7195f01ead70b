"""Names the measured values (figures) that a Markdown page can show inline.

A page shows one between two comments, which `python -m benchmarks figures` fills:

    <!-- figure step.llama.float32.fusedops -->1.32x<!-- /figure -->
    <!-- figure step.llama.float32.fusedops interval -->1.32x (1.17..1.32)<!-- /figure -->

To add a figure, yield its name and a `Figure` from `named` or from a generator that it calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures.results import RESULTS, FigureError, Result, find

__all__ = ["FIGURES", "NOTE", "Figure", "lookup"]

NOTE = "note"  # where and when a page's figures were measured

SCALES = {"ms": 1e3, "us": 1e6, "%": 1e2}
MODELS = ("llama", "gpt2", "bert", "t5")
DTYPES = ("float32", "bfloat16")
# Name in a figure -> contender of step.json.
STEPS = {
    "fusedops": "fusedops",
    "fusedops_adamw": "fusedops and its AdamW",
    "compile": "torch.compile",
    "without_attention": "without attention",
    "without_linear": "without linear",
}


@dataclass(frozen=True)
class Figure:
    """A value of a row of a result file.

    stem: the file's name. match: the keys that identify the row; a `title` needs only to begin with
    its value. value: a key. unit: x, ms, us or %. over: another row's contender; the figure is its
    value over this row's.
    """

    stem: str
    match: dict[str, Any]
    value: str = "over_eager"
    unit: str = "x"
    digits: int | None = None
    over: str | None = None

    def result(self, results: Path = RESULTS) -> Result:
        """The first machine's file that has the row."""
        files = find(self.stem, results)
        for file in files:
            if self._row(file, self.match) is not None:
                return file
        names = ", ".join(file.name for file in files)
        raise FigureError(f"no row with {self.match} in {names}")

    def raw(self, results: Path = RESULTS) -> Any:
        file = self.result(results)
        value = self._value(file, self.match)
        if self.over is not None:
            return self._value(file, self.match | {"contender": self.over}) / value
        return value

    def text(self, interval: bool = False, results: Path = RESULTS) -> str:
        """`1.32x`, or `1.32x (1.17..1.32)`."""
        value = self.raw(results)
        middle, *ends = _numbers(value)
        if interval and not ends:
            raise FigureError("has no interval")
        unit = self.unit if self.unit == "x" else f" {self.unit}"
        shown = f"{self._number(middle)}{unit}"
        return f"{shown} ({'..'.join(map(self._number, ends))})" if interval else shown

    def _row(self, file: Result, match: dict[str, Any]) -> dict | None:
        return next((row for row in file.document["rows"] if _fits(row, match)), None)

    def _value(self, file: Result, match: dict[str, Any]) -> Any:
        row = self._row(file, match)
        if row is None:
            raise FigureError(f"no row with {match} in {file.name}")
        if row.get(self.value) is None:
            raise FigureError(f"{file.name}: the row with {match} has no {self.value}")
        return row[self.value]

    def _number(self, value: float) -> str:
        value *= SCALES.get(self.unit, 1.0)
        if self.digits is not None:
            return f"{value:.{self.digits}f}"
        if self.unit == "x":
            return f"{value:.2f}" if value < 20 else f"{value:.0f}"
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _numbers(value: Any) -> list[float]:
    """A value, followed by the ends of its interval if it has one."""
    return list(value) if isinstance(value, list) else [value]


def _fits(row: dict, match: dict[str, Any]) -> bool:
    title = row.get("title", "")
    rest = {key: value for key, value in match.items() if key != "title"}
    starts = title.startswith(match.get("title", ""))
    return starts and all(row.get(key) == value for key, value in rest.items())


def lookup(name: str) -> Figure:
    """Returns a figure. Raises FigureError with the similar names if there is none."""
    if name not in FIGURES:
        start = name.split(".")[0]
        near = [key for key in FIGURES if key.split(".")[0] == start] or list(FIGURES)
        few = ", ".join(near[:12]) + (", ..." if near[12:] else "")
        raise FigureError(f"no figure {name!r} in benchmarks/figures/registry.py; it has {few}")
    return FIGURES[name]


def named() -> Iterator[tuple[str, Figure]]:
    """Every figure and its name."""
    for model in MODELS:
        for dtype in DTYPES:
            title = f"training step of {model} {dtype} [4, 256], default"
            for name, contender in STEPS.items():
                match = {"title": title, "contender": contender}
                yield f"step.{model}.{dtype}.{name}", Figure("step", match)
    title = "AdamW step, 16.8M float32 parameters, 8-bit peers"
    match = {"title": title, "contender": "fusedops int8"}
    yield "adamw.over_bitsandbytes", Figure("adamw", match, "median_s", over="bitsandbytes")
    yield from _generate()
    yield from _recording()
    yield from _few_rows()
    yield from _memory()


def _generate() -> Iterator[tuple[str, Figure]]:
    """A token's time, its ratio, and its share outside of kernels, by cache and contender."""
    for cache in ("Dynamic", "Static"):
        title = f"generate of llama bfloat16, 512 + 32 tokens, a {cache}Cache"
        names = ["unpatched", "fusedops", "fusedops, nf4"]
        names += ["low_latency", "low_latency, nf4"] if cache == "Static" else []
        for name in names:
            short = f"generate.{cache.lower()}.{name.replace(', ', '_')}"
            match = {"title": title, "contender": name}
            yield f"{short}.token", Figure("generate", match, "token_p50_s", "ms")
            yield f"{short}.ratio", Figure("generate", match, "token_ratio_to_dynamic")
            yield f"{short}.outside", Figure("generate", match, "outside_kernels", "%", 0)


def _recording() -> Iterator[tuple[str, Figure]]:
    for name, contender in (("eager", "eager"), ("fusedops", "fused")):
        match = {"contender": contender}
        yield f"recording.{name}.overhead", Figure("recording", match, "overhead", "%", 2)
        yield f"recording.{name}.own", Figure("recording", match, "own_cpu_s", "us", 0)
        yield f"recording.{name}.step", Figure("recording", match, "step_s", "ms", 0)


def _few_rows() -> Iterator[tuple[str, Figure]]:
    """Milliseconds of a bfloat16 product with a weight of 4096 x 4096, by rows of the input."""
    for rows in (1, 8, 32, 256):
        title = f"linear bfloat16 [{rows}, 4096] to 4096,"
        for name, contender in (("torch", "eager"), ("nf4", "nf4"), ("int8", "int8")):
            match = {"title": title, "contender": contender}
            for unit, stem in (("amx", "few-rows"), ("no_amx", "few-rows-without-amx")):
                yield f"{unit}.{name}.{rows}", Figure(stem, match, "median_s", "ms", 1)


def _memory() -> Iterator[tuple[str, Figure]]:
    """The largest errors of the predicted growth of processes, and how far processes differ."""
    for kind, threads in (("tuned", 1), ("tuned", 2), ("held-out", 1)):
        match = {"title": f"{kind}, {threads} thread"}
        yield f"memory.{kind}.{threads}", Figure("process-memory", match, "growth_error", "%", 1)
    match = {"title": "processes of a row"}
    yield "memory.spread", Figure("process-memory", match, "spread", "%", 1)


FIGURES = dict(named())
