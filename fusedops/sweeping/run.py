"""`fusedops.sweep`: times model variants at one batch size and length after another."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.measuring.alternate import TooSlow
from fusedops.measuring.driver import Driver
from fusedops.measuring.environment import environment
from fusedops.measuring.memory.measured import measure_memory
from fusedops.measuring.progress import progress
from fusedops.measuring.quantiles import median_interval, quantile
from fusedops.measuring.ratios import paired_ratio
from fusedops.measuring.sampling import Run, Samples, sample
from fusedops.measuring.snapshot import Snapshot
from fusedops.measuring.units import bytes_text
from fusedops.sweeping.arguments import MEMORY, SweepRequest
from fusedops.sweeping.choice import stops_growing
from fusedops.sweeping.modes import device_of, runner, timed, tokens_of
from fusedops.sweeping.result import Sweep
from fusedops.sweeping.room import Peaks, limit_bytes
from fusedops.sweeping.row import SweepRow
from fusedops.sweeping.variants import EAGER, variant

__all__ = ["measure", "sweep"]

WARMUP = 2  # runs of a variant at each point before it is timed
VARIANTS = (EAGER, "patched")


def sweep(
    make_batch: Callable[[int, int | None], Any],
    *,
    model: nn.Module | None = None,
    step: Callable[[Any], object] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Sequence[int] = (1, 2, 4, 8, 16),
    length: Sequence[int] | int | None = None,
    mode: str = "train",
    variants: Sequence[str] = VARIANTS,
    budget_s: float = 300.0,
    memory_limit: float | int = MEMORY,
    new_tokens: int = 32,
    past_knee: bool = False,
) -> Sweep:
    """Measures latency, throughput and memory over batches, lengths and variants of a model.

    make_batch(batch, length): gives one batch, as the model's keyword arguments in a dictionary,
    its positional ones in a tuple or list, or one tensor; length is None if none is given. model:
    is trained (`zero_grad`, forward with labels, backward, and the optimizer's step if there is
    one), or runs its forward without gradients, or generates `new_tokens` tokens greedily, by mode
    "train", "forward", "generate". step(batch): is timed instead of a model; then there is only the
    variant "eager". Both run on the CPU: nothing waits for another device's work.

    variants: "eager", or parts joined by "+": "patched" (`fusedops.patch`), "compiled"
    (`torch.compile`), "quantized:nf4" (`fusedops.quantize`); in mode "generate" also "static" (a
    static cache) and "low_latency" (`fusedops.low_latency`). They share the model's parameters
    and take turns at each point.

    budget_s: seconds for all points. memory_limit: an int is bytes of a step's peak, a float a
    fraction of the memory that is available at the start. The peak of a point is predicted from
    smaller ones, and a point over the limit is skipped: on a CPU the system would end the process.
    A curve ends where twice the batch gives less than 10 % more throughput, unless past_knee.

    Afterwards model, optimizer and the default random generators are bit for bit what they were.
    Raises ValueError or TypeError for arguments that it cannot use. An error of a
    step is raised with a note that names the point.
    """
    request = SweepRequest(
        make_batch,
        model,
        step,
        optimizer,
        batch,
        length,
        mode,
        variants,
        budget_s,
        memory_limit,
        new_tokens,
    )
    return measure(request, past_knee)


def measure(request: SweepRequest, past_knee: bool) -> Sweep:
    """The sweep of checked arguments."""
    rows = tuple(_measured(request, past_knee))
    model, step = request.model, request.step
    about = environment(torch.get_num_threads(), device_of(model))
    name = type(model).__name__ if model is not None else getattr(step, "__name__", "step")
    about |= {"model": name, "load": os.getloadavg()[0], "new_tokens": request.new_tokens}
    return Sweep(request.mode if model is not None else "step", rows, about)


@dataclass
class Contender:
    """A variant at work.

    rows: the measured ones, by length. ended: why larger batches are skipped, by length.
    """

    name: str
    run: Run
    model: nn.Module | None
    peaks: Peaks = field(default_factory=Peaks)
    rows: dict[int | None, list[SweepRow]] = field(default_factory=dict)
    ended: dict[int | None, str] = field(default_factory=dict)


def _measured(request: SweepRequest, past_knee: bool) -> Iterator[SweepRow]:
    """The rows, point after point, smaller ones first.

    A larger point gets more time, as its steps take longer: in proportion to the root of its size,
    so that small ones still get more rounds.
    """
    deadline = perf_counter() + request.budget_s
    points = [(batch, length) for length in request.lengths for batch in request.batches]
    kept = Snapshot(request.model, request.optimizer)
    with kept, progress("sweeping", len(points)) as on_point:
        contenders = [*_contenders(request)]
        limit = limit_bytes(request.memory_limit, _held(request))
        weights = [math.sqrt(batch * (length or 1)) for batch, length in points]
        for i, (batch, length) in enumerate(points):
            share = (deadline - perf_counter()) * weights[i] / sum(weights[i:])
            place = _Place(batch, length, share, deadline)
            yield from _point(request, contenders, place, limit, past_knee)
            on_point()


def _contenders(request: SweepRequest) -> Iterator[Contender]:
    for name in request.variants:
        if request.model is None:
            assert request.step is not None
            yield Contender(name, timed(request.step), None)
            continue
        chosen = variant(name, request.mode)
        model = chosen.model(request.model)
        run = runner(request.mode, model, request.optimizer, chosen, request.new_tokens)
        yield Contender(name, run, model)


def _held(request: SweepRequest) -> int:
    """Bytes that the model and the optimizer hold before the first step."""
    state = request.optimizer.state.values() if request.optimizer is not None else ()
    tensors = [t for values in state for t in values.values() if isinstance(t, torch.Tensor)]
    tensors += [*request.model.parameters(), *request.model.buffers()] if request.model else []
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


@dataclass(frozen=True)
class _Place:
    """A point, the seconds that it may take, and when the whole sweep must end."""

    batch: int
    length: int | None
    seconds: float
    deadline: float

    def row(self, contender: Contender, **measured: Any) -> SweepRow:
        return SweepRow(contender.name, self.batch, self.length, **measured)


def _point(
    request: SweepRequest, contenders: list[Contender], place: _Place, limit: int, past_knee: bool
) -> Iterator[SweepRow]:
    """The rows of one point, in the order of the variants."""
    skipped = {c.name: _why_skipped(c, place, limit) for c in contenders}
    todo = [contender for contender in contenders if not skipped[contender.name]]
    measured: dict[str, SweepRow] = {}
    if todo:
        try:
            sampled_rows = _sampled(request, todo, place)
        except TooSlow as error:
            skipped |= dict.fromkeys((c.name for c in todo), str(error))
        else:
            measured = {row.variant: row for row in sampled_rows}
    for contender in contenders:
        if contender.name in measured:
            row = measured[contender.name]
            _remember(contender, place, row, past_knee)
            yield row
        else:
            predicted = contender.peaks.predict(place.batch, place.length)
            why = skipped[contender.name]
            yield place.row(contender, skipped_reason=why, predicted_bytes=predicted)


def _why_skipped(contender: Contender, place: _Place, limit: int) -> str:
    """Why a point is not measured; empty if it is."""
    if place.length in contender.ended:
        return contender.ended[place.length]
    predicted = contender.peaks.predict(place.batch, place.length)
    if predicted is not None and predicted > limit:
        sizes = f"{bytes_text(predicted)}, the limit is {bytes_text(limit)}"
        return f"its predicted peak is {sizes}"
    return "the budget is used up" if perf_counter() > place.deadline else ""


def _remember(contender: Contender, place: _Place, row: SweepRow, past_knee: bool) -> None:
    """Keeps a row for the next ones, and ends the curve past its knee."""
    before = contender.rows.setdefault(place.length, [])
    if before and not past_knee and stops_growing(before[-1], row):
        contender.ended[place.length] = f"past the knee at batch {before[-1].batch}"
    before.append(row)


def _sampled(request: SweepRequest, todo: list[Contender], place: _Place) -> list[SweepRow]:
    where = f"sweep: batch {place.batch}, length {place.length}"
    start = perf_counter()
    try:
        batch = request.make_batch(place.batch, place.length)
        predicted = [c.peaks.predict(place.batch, place.length) for c in todo]
        peaks = [_prepared(request, contender, place, batch) for contender in todo]
        left = max(0.0, place.seconds - (perf_counter() - start))
        samples_by_run = sample([c.run for c in todo], batch, left, place.deadline)
    except TooSlow:
        raise
    except Exception as error:
        error.add_note(where)
        raise
    base = samples_by_run[0] if todo[0].name == request.variants[0] and len(todo) > 1 else None
    rows = [
        replace(
            _row(request.mode, c, place, batch, samples), peak_bytes=peak, predicted_bytes=guess
        )
        for c, samples, peak, guess in zip(todo, samples_by_run, peaks, predicted, strict=True)
    ]
    if base is None:
        return rows
    ratios = [paired_ratio(_paired(base), _paired(samples)) for samples in samples_by_run[1:]]
    return [rows[0], *(replace(r, ratio=q) for r, q in zip(rows[1:], ratios, strict=True))]


def _prepared(request: SweepRequest, contender: Contender, place: _Place, batch: Any) -> int:
    """Warms a variant up, and measures the peak of one run."""
    for _ in range(WARMUP):
        contender.run(batch)
    model, optimizer = contender.model, request.optimizer if request.mode == "train" else None
    device = device_of(model)
    driver = Driver(index=device.index) if device.type == "cuda" else None
    run = partial(contender.run, batch)
    use = measure_memory(run, model=model, optimizer=optimizer, driver=driver)
    contender.peaks.add(place.batch, place.length, use)
    return use.peak


def _paired(samples: Samples) -> list[float]:
    """One number a round: the median token of a generation, else the run."""
    return [median(run.latencies) for run in samples.runs]


def _row(mode: str, contender: Contender, place: _Place, batch: Any, samples: Samples) -> SweepRow:
    latencies, whole = samples.latencies, median(samples.seconds)
    row = place.row(
        contender,
        p50=median(latencies),
        p50_interval=median_interval(_paired(samples)),
        p95=quantile(latencies, 0.95),
        p99=quantile(latencies, 0.99),
        seconds_per_sample=whole / place.batch,
        throughput=place.batch / whole,
        samples=len(latencies),
        noisy=samples.noisy,
    )
    if mode == "generate":
        tokens = len(samples.runs[0].tokens)
        first = median(run.tokens[0] for run in samples.runs)
        rate = place.batch * tokens / whole
        return replace(row, tokens_per_s=rate, first_token=first, end_to_end=whole)
    given = tokens_of(batch)
    return row if given is None else replace(row, tokens_per_s=given / whole)
