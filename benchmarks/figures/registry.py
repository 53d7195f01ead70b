"""Names the measured values (figures) that a Markdown page can show inline.

A page shows one between two comments, which `python -m benchmarks figures` fills:

    <!-- figure step.llama.float32.fusedops -->1.32x<!-- /figure -->
    <!-- figure step.llama.float32.fusedops interval -->1.32x (1.17..1.32)<!-- /figure -->

To add a figure, yield its name and a `Figure` from `named` or from a generator that it calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures.results import RESULTS, FigureError, Result, find

__all__ = ["FIGURES", "NOTE", "Figure", "lookup"]

NOTE = "note"  # where and when a page's figures were measured

SCALES = {"ms": 1e3, "us": 1e6, "MB": 1e-6, "MiB": 2**-20, "%": 1e2}
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

    stem: the file's name. table: "rows" or "goals", or "" for the document
    itself. match: the keys that identify the row; a `title` needs only to begin with its value.
    value: a key, or a function of the row. unit: x, ms, us, MB, MiB, % or "" with `digits`.
    over: another row's contender; the figure is its value over this row's.
    """

    stem: str
    match: dict[str, Any] = field(default_factory=dict)
    value: str | Callable[[dict], Any] = "over_eager"
    unit: str = "x"
    digits: int | None = None
    table: str = "rows"
    over: str | None = None

    def result(self, results: Path = RESULTS) -> Result:
        """The first machine's file that has the row."""
        files = find(self.stem, results)
        for file in files:
            if self._row(file, self.match) is not None:
                return file
        names = ", ".join(file.name for file in files)
        raise FigureError(f"no entry of {self.table} with {self.match} in {names}")

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
        shown = f"{self._number(middle)}{self._unit()}"
        return f"{shown} ({'..'.join(map(self._number, ends))})" if interval else shown

    def _row(self, file: Result, match: dict[str, Any]) -> dict | None:
        if not self.table:
            return file.document
        rows = file.document.get(self.table, [])
        return next((row for row in rows if _fits(row, match)), None)

    def _value(self, file: Result, match: dict[str, Any]) -> Any:
        row = self._row(file, match)
        if row is None:
            raise FigureError(f"no entry of {self.table} with {match} in {file.name}")
        try:
            value = self.value(row) if callable(self.value) else row[self.value]
        except (KeyError, TypeError) as error:
            raise FigureError(f"{file.name}: the row with {match} has no {error}") from error
        if value is None:
            raise FigureError(f"{file.name}: the row with {match} was not measured")
        return value

    def _number(self, value: float) -> str:
        value *= SCALES.get(self.unit, 1.0)
        if self.digits is not None:
            return f"{value:.{self.digits}f}"
        if self.unit == "x":
            return f"{value:.2f}" if value < 20 else f"{value:.0f}"
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"

    def _unit(self) -> str:
        return self.unit if self.unit in ("", "x") else f" {self.unit}"


def _numbers(value: Any) -> list[float]:
    """A value, followed by the ends of its interval if it has one."""
    if isinstance(value, dict):
        return [value["median"], value["low"], value["high"]]
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
    yield from _steps()
    yield from _goals()
    yield from _adamw()
    yield from _serving()
    yield from _small()
    yield from _host()
    yield from _few_rows()


def _steps() -> Iterator[tuple[str, Figure]]:
    for model in MODELS:
        for dtype in DTYPES:
            title = f"training step of {model} {dtype} [4, 256], default"
            for name, contender in STEPS.items():
                match = {"title": title, "contender": contender}
                yield f"step.{model}.{dtype}.{name}", Figure("step", match)
            for name in ("eager", "fusedops"):
                match = {"title": title, "contender": name}
                yield f"step.{model}.{dtype}.{name}.ms", Figure("step", match, "median_s", "ms")
    demo = "demo"
    yield "demo.ratio", Figure(demo, value="ratio", table="")
    for name, key in (("eager", "eager"), ("fusedops", "fused")):
        peak = lambda d, n=key: d["contenders"][n]["peak_bytes"]  # noqa: E731
        yield f"demo.{name}.peak", Figure(demo, value=peak, unit="MiB", digits=0, table="")


# Name -> file, title and what it is compared with, of a goal under the default allocator.
NORM = "must-show-norm"
GATED = "must-show-gated-activation"
ROTARY = "must-show-rotary"
LOSS = "must-show-cross-entropy"
ATTENTION = "must-show-attention"
QUANTIZED = "must-show-quantized-linear"
TRAIN = "forward+backward"
GOALS = {
    "norm.add_rms_norm.bfloat16": (NORM, f"add_rms_norm {TRAIN} bfloat16 [2048", "huggingface"),
    "norm.add_rms_norm.float32": (NORM, f"add_rms_norm {TRAIN} float32 [2048", "huggingface"),
    "norm.add_layer_norm.bfloat16": (NORM, f"add_layer_norm {TRAIN} bfloat16 [2048", "eager"),
    "swiglu.bfloat16": (GATED, f"swiglu {TRAIN} bfloat16 [2048", "eager"),
    "rotary.forward": (ROTARY, "rotary_embedding forward bfloat16 [1, 32, 8, 2048", "huggingface"),
    "rotary.training": (ROTARY, f"rotary_embedding {TRAIN} bfloat16", "huggingface"),
    "cross_entropy": (LOSS, f"cross_entropy {TRAIN} bfloat16", "huggingface"),
    "linear_cross_entropy": (LOSS, f"linear_cross_entropy {TRAIN} bfloat16", "huggingface"),
    "attention.forward": (ATTENTION, "attention forward bfloat16 [1, 12", "sdpa"),
    "attention.causal": (ATTENTION, "attention causal forward bfloat16 [1, 12", "sdpa"),
    "attention.training": (ATTENTION, f"attention causal {TRAIN} bfloat16 [1, 12", "sdpa"),
    "attention.decode": (ATTENTION, "attention decode forward bfloat16", "sdpa"),
}


def _goals() -> Iterator[tuple[str, Figure]]:
    for name, (stem, title, over) in GOALS.items():
        match = {"title": title, "what": f"over {over}"}
        yield name, Figure(stem, match, "measured", table="goals")
    for form in ("int8, int8 inputs", "int8", "nf4", "int4"):
        short = form.replace(", ", "_").replace(" ", "_")
        for rows in (1, 16, 256):
            if form == "int8" and rows == 256:
                continue
            match = {"title": f"quantized_linear {form} forward float32 [{rows}, 4096, 4096]"}
            yield (
                f"quantized.{short}.{rows}",
                Figure(QUANTIZED, match | {"what": "over eager"}, "measured", table="goals"),
            )
    for form in ("int8", "fp8", "nf4", "int4"):
        match = {"title": f"quantize_weight {form} forward float32 [4096", "contender": "fusedops"}
        yield f"quantize_weight.{form}", Figure("quantize-weight", match, "median_s", "ms")
    for name in ("fusedops", "huggingface"):
        match = {"title": "linear_cross_entropy", "contender": name}
        figure = Figure(LOSS, match, "peak_bytes", "MB", digits=0)
        yield f"linear_cross_entropy.{name}.peak", figure


# Name -> how a title of adamw.json begins, after "AdamW step, ".
STATES = {
    "tensors_64": "448 tensors of 64,",
    "tensors_4096": "448 tensors of 4096,",
    "tensors_16384": "448 tensors of 16384,",
    "tensors_65536": "448 tensors of 65536,",
    "large": "16.8M float32 parameters,",
}


def _adamw() -> Iterator[tuple[str, Figure]]:
    for threads, stem in ((1, "adamw"), (2, "adamw-2-threads")):
        ending = f" {threads} thread"
        for name, start in STATES.items():
            for state in ("float32", "int8"):
                match = {"title": f"AdamW step, {start}{ending}", "contender": f"fusedops {state}"}
                figure = Figure(stem, match, "median_s", over="torch fused")
                yield f"adamw.{name}.{state}" + ".2_threads" * (threads == 2), figure
    for peer in ("bitsandbytes", "torchao"):
        title = "AdamW step, 16.8M float32 parameters, 8-bit peers"
        match = {"title": title, "contender": "fusedops int8"}
        yield f"adamw.over_{peer}", Figure("adamw", match, "median_s", over=peer)
    for name, contender in (
        ("torch.float32", "torch float32"),
        ("torch.bfloat16", "torch bfloat16"),
        ("fusedops.float32", "fusedops float32"),
        ("fusedops.float32_int8", "fusedops int8"),
        ("fusedops.bfloat16", "fusedops bfloat16"),
        ("fusedops.bfloat16_int8", "fusedops bfloat16, int8"),
    ):
        figure = Figure("adamw-loss", {"contender": contender}, "mean", unit="", digits=4)
        yield f"adamw_loss.{name}", figure


def _serving() -> Iterator[tuple[str, Figure]]:
    for cache in ("Dynamic", "Static"):
        title = f"generate of llama bfloat16, 512 + 32 tokens, a {cache}Cache"
        names = ["unpatched", "fusedops", "fusedops, nf4"]
        if cache == "Static":
            names += ["low_latency", "low_latency, nf4"]
        for name in names:
            short = f"generate.{cache.lower()}.{name.replace(', ', '_')}"
            match = {"title": title, "contender": name}
            yield f"{short}.tokens_per_s", Figure("generate", match, "tokens_per_s", "", 1)
            yield f"{short}.first_token", Figure("generate", match, "first_token_s", "ms")
            yield f"{short}.token", Figure("generate", match, "token_p50_s", "ms")
            yield f"{short}.ratio", Figure("generate", match, "token_ratio_to_dynamic")
            yield f"{short}.outside", Figure("generate", match, "outside_kernels", "%", 0)
    for name in ("int8", "int8, int8 inputs", "fp8", "nf4, mse", "int4, mse", "bitsandbytes nf4"):
        match, short = {"contender": name}, name.replace(", ", "_").replace(" ", "_")
        of = "sentences"
        yield f"sentences.{short}.one", Figure(of, match, "latency_ratio")
        yield f"sentences.{short}.batches", Figure(of, match, "throughput_ratio")
        yield f"sentences.{short}.cosine", Figure(of, match, "mean cosine", unit="", digits=4)


def _small() -> Iterator[tuple[str, Figure]]:
    match = {"title": "patch of llama on the meta device", "what": "ms"}
    yield "patch.ms", Figure("small", match, lambda g: g["measured"] / 1e3, "ms", 0, "goals")
    for model in MODELS:
        for what, title in (("step", "training step"), ("forward", "forward")):
            match = {"title": f"{title} of {model} float32 [1, 128]", "what": "over eager"}
            name = f"small.{model}.{what}.128"
            yield name, Figure("small", match, "measured", table="goals")
    for name, contender in (("eager", "eager"), ("fusedops", "fused")):
        match, of = {"contender": contender}, "recording"
        yield f"recording.{name}.overhead", Figure(of, match, "overhead", "%", 2)
        yield f"recording.{name}.own", Figure(of, match, "own_cpu_s", "us", 0)
        yield f"recording.{name}.step", Figure(of, match, "step_s", "ms", 0)


def _host() -> Iterator[tuple[str, Figure]]:
    """Microseconds of a call on [1, 64], and their ratio."""
    ours = "fusedops functional"
    for operation in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
        for mode, short in (("forward", "forward"), (TRAIN, "training")):
            match = {"operation": operation, "mode": mode, "shape": [1, 64]}
            name = f"launch.{operation}.{short}"
            of = "launch"
            yield f"{name}.eager", Figure(of, match | {"contender": "eager"}, "median_s", "us")
            yield f"{name}.fusedops", Figure(of, match | {"contender": ours}, "median_s", "us")
            yield name, Figure(of, match | {"contender": ours}, "ratio_to_eager")


def _few_rows() -> Iterator[tuple[str, Figure]]:
    """Milliseconds of a bfloat16 product with a weight of 4096 x 4096, by rows of the input."""
    for rows in (1, 8, 32, 256):
        title = f"linear bfloat16 [{rows}, 4096] to 4096,"
        for name, contender in (("torch", "eager"), ("nf4", "nf4"), ("int8", "int8")):
            match = {"title": title, "contender": contender}
            for unit, stem in (("amx", "few-rows"), ("no_amx", "few-rows-without-amx")):
                yield f"{unit}.{name}.{rows}", Figure(stem, match, "median_s", "ms", 1)


FIGURES = dict(named())
