"""Times fusedops' AdamW step against other libraries' and a copy: `python -m benchmarks adamw`.

A row is a step over tensors of one size. Next to it, a copy moves as many bytes, half read and half
written. The copy is not a lower bound, since a step writes in place and a copy does not. Contenders
alternate, each with its own tensors. The 8-bit peers are tens of times slower, so they have their
own rows with few rounds; they are timed if installed (`fusedops[peers]`).
"""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.case import Skip
from benchmarks.harness.timing import interleaved
from benchmarks.operators.adamw.contenders import (
    MAX_NORM,
    Make,
    about,
    bitsandbytes,
    bytes_moved,
    clipped,
    our_clip,
    ours,
    torch_clip,
    torch_fused,
    torchao,
)
from fusedops.measuring.ratios import paired_ratio, spread

FLOAT32, INT8 = "fusedops float32", "fusedops int8"
TORCH, COPY = "torch fused", "copy"
BNB, AO, AO_BY_CHANCE = "bitsandbytes", "torchao", "torchao, rounded stochastically"
PLAIN: dict[str, Make] = {
    TORCH: torch_fused,
    FLOAT32: ours,
    INT8: partial(ours, state_dtype="int8"),
}
EIGHT_BITS: dict[str, Make] = {INT8: PLAIN[INT8], BNB: bitsandbytes, AO: torchao}


@dataclass(frozen=True)
class Row:
    """Steps over `count` tensors of `numel` elements. at_least: our goal over a contender."""

    title: str
    numel: int
    count: int = 1
    dtype: torch.dtype = torch.float32
    contenders: dict[str, Make] = field(default_factory=lambda: PLAIN)
    at_least: tuple[tuple[str, str, float], ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes that a step with int8 state moves."""
        return bytes_moved(self.numel * self.count, self.dtype.itemsize, "int8")


LARGE = 4096 * 4096
LORA = [
    Row(
        f"448 tensors of {numel}",
        numel,
        448,
        at_least=((INT8, TORCH, 1.6), (FLOAT32, TORCH, 1.0)),
    )
    for numel in (4096, 16384, 65536)
]
CLIPPED = [
    Row(
        f"clipping and step, 448 tensors of {numel}",
        numel,
        448,
        contenders={TORCH: clipped(torch_fused), FLOAT32: partial(ours, max_grad_norm=MAX_NORM)},
        at_least=((FLOAT32, TORCH, 1.3),),
    )
    for numel in (4096, 16384, 65536)
]
CLIPPED += [
    Row(
        f"clip_grad_norm_ alone, 448 tensors of {numel}",
        numel,
        448,
        contenders={TORCH: torch_clip, FLOAT32: our_clip},
        at_least=((FLOAT32, TORCH, 1.0),),
    )
    for numel in (64, 16384)
]
BESIDE_PEERS = [
    Row(
        "16.8M float32 parameters, 8-bit peers",
        LARGE,
        contenders=EIGHT_BITS,
        at_least=((INT8, BNB, 40.0),),
    ),
    Row(
        "16.8M bfloat16 parameters, 8-bit peers",
        LARGE,
        dtype=torch.bfloat16,
        contenders=EIGHT_BITS | {AO_BY_CHANCE: partial(torchao, bf16_stochastic_round=True)},
    ),
]
BESIDE_PEERS += [
    Row(f"448 tensors of {numel}, 8-bit peers", numel, 448, contenders=EIGHT_BITS)
    for numel in (4096, 16384, 65536, 64)
]
ROWS = [
    Row(
        "16.8M float32 parameters",
        LARGE,
        at_least=((INT8, TORCH, 1.6), (INT8, COPY, 0.85), (FLOAT32, TORCH, 1.0)),
    ),
    Row(
        "16.8M bfloat16 parameters, rounded stochastically by fusedops",
        LARGE,
        dtype=torch.bfloat16,
        at_least=((INT8, TORCH, 1.2),),
    ),
    *LORA,
    *CLIPPED,
    Row("448 tensors of 64", 64, 448, at_least=((FLOAT32, TORCH, 3.0), (INT8, TORCH, 3.0))),
    *BESIDE_PEERS,
]
QUICK = [Row("8 tensors of 5000", 5000, 8, at_least=((INT8, TORCH, 1.0),))]


def measure(args: Namespace) -> int:
    """Times every row and writes `args.json`. Returns the exit status."""
    rows, goals = [], []
    for row in QUICK if args.quick else ROWS:
        seconds, skipped = _seconds(row, args.seconds)
        title = f"AdamW step, {row.title}, {args.threads} thread{'s' * (args.threads > 1)}"
        title += f", {args.allocator} allocator"
        for name, times in seconds.items():
            rows.append(_timed(title, row, name, times))
            print(f"{title}, {name}: {spread(times).median * 1e3:.3f} ms", flush=True)
        rows += [
            {"title": title, "contender": name, "status": "skipped", "reason": reason}
            for name, reason in skipped.items()
        ]
        goals += [
            report.goal(
                title,
                f"{ours_} over {other}",
                asked,
                paired_ratio(seconds[other], seconds[ours_]),
            )
            for ours_, other, asked in row.at_least
            if other in seconds
        ]
    report.save(args, rows, goals)
    return 0


def _timed(title: str, row: Row, name: str, times: list[float]) -> dict:
    timed = report.times(times)
    return {
        **{"title": title, "contender": name, "status": "timed", "rounds": len(times)},
        **about(name),
        **timed,
        "ns_per_parameter": timed["median_s"] / (row.numel * row.count) * 1e9,
    }


def _seconds(row: Row, budget_s: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Returns each contender's seconds per step, and why others were not timed."""
    steps, skipped = {}, {}
    for name, make in row.contenders.items():
        try:
            steps[name] = (make(_parameters(row)), nullcontext)
        except Skip as reason:
            skipped[name] = str(reason)
    source = torch.ones(row.bytes // 2, dtype=torch.uint8)  # its own pages
    steps[COPY] = (partial(torch.empty_like(source).copy_, source), nullcontext)
    for step, _ in steps.values():
        step()  # creates the state
    return interleaved(steps, budget_s), skipped


def _parameters(row: Row) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(row.numel, generator=draw).to(row.dtype) for _ in range(row.count)]
    for p in params:
        p.requires_grad_().grad = torch.randn(row.numel, generator=draw).to(row.dtype) * 0.01
    return params
