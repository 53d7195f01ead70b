"""Times fusedops' AdamW step against other libraries' and a copy: `python -m benchmarks adamw`.

A row is a step over tensors of one size. Next to it, a copy moves as many bytes, half read and half
written. The copy is not a lower bound, since a step writes in place and a copy does not. Contenders
alternate, each with its own tensors. The 8-bit peers are tens of times slower, so they have their
own rows with few rounds; they are timed if installed (`fusedops[peers]`).

A contender takes parameters that have gradients and returns the call to time. The first call
creates the state, and compiles the step if the contender needs that.
"""

import gc
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import fusedops
from benchmarks.harness import report
from benchmarks.harness.case import (
    FORWARD,
    Case,
    Contender,
    Operation,
    Run,
    Skip,
    find,
    need_compiler,
)
from benchmarks.harness.run import COPY
from benchmarks.harness.timing import interleaved
from fusedops.measuring.ratios import paired_ratio, spread
from fusedops.references.adamw import stochastic

Step = Callable[[], object]
Make = Callable[[list[Tensor]], Step]

MAX_NORM = 1.0


def bytes_moved(elements: int, itemsize: int, state_dtype: str, clips: bool = False) -> int:
    """Returns bytes that a step must move: parameters and moments twice, gradients once or twice.

    The second time is for clipping. Two 8-bit moments have two float32 scales per 256 elements.
    """
    moments = {"float32": 8.0, "int8": 2 + 8 / 256}[state_dtype]
    return int(elements * ((3 + clips) * itemsize + 2 * moments))


def torch_fused(params: list[Tensor]) -> Step:
    return torch.optim.AdamW(params, fused=True).step


def ours(params: list[Tensor], **options) -> Step:
    return fusedops.optim.AdamW(params, **options).step


def bitsandbytes(params: list[Tensor], name: str = "AdamW8bit") -> Step:
    return find("bitsandbytes.optim", name)(params).step


def torchao(params: list[Tensor], **options) -> Step:
    if params[0].device.type == "cpu":
        need_compiler("torchao's compiled step")
    torch.compiler.reset()  # else each call checks what other rows compiled
    return find("torchao.optim", "AdamW8bit")(params, **options).step


def torch_clip(params: list[Tensor]) -> Step:
    return partial(torch.nn.utils.clip_grad_norm_, params, MAX_NORM)


def our_clip(params: list[Tensor]) -> Step:
    return partial(fusedops.clip_grad_norm_, params, MAX_NORM)


def clipped(make: Make) -> Make:
    """torch's clipping followed by the step, as in training loops."""

    def prepare(params: list[Tensor]) -> Step:
        clip, step = torch_clip(params), make(params)

        def clip_and_step() -> None:
            clip()
            step()

        return clip_and_step

    return prepare


FLOAT32, INT8 = "fusedops float32", "fusedops int8"
TORCH = "torch fused"
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


# Rows on a GPU: `python -m benchmarks gpu adamw`. To the harness, a step is a forward: it takes
# parameters and gradients, and returns the parameters. The harness checks each contender's first
# step, on its own parameters, and times later ones. Large steps use the device's clock, next to a
# copy of the bytes that a step with our state must move. The host's launches dominate steps over
# many small tensors, so these are timed on the host.

BILLION_ELEMENTS = (1, 10**9)  # tensors, elements per tensor
LORA_SHAPES = ((448, 4096), (448, 65536))
F32, BF16 = torch.float32, torch.bfloat16

LR, EPS, WEIGHT_DECAY = 1e-3, 1e-8, 1e-2  # every contender's own defaults
EVERY = 1009  # stride of the checked elements of a large tensor; a prime covers every lane


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Parameters, then gradients. For gradients far above eps, a first step shows only the sign."""
    gc.collect()  # optimizers are in cycles; two of the largest rows exceed a GPU's memory
    count, numel = shape
    params = [torch.randn(numel, dtype=dtype, device=device) for _ in range(count)]
    return (*params, *(torch.randn_like(p) * EPS for p in params))


def halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


def judged(t: Tensor) -> Tensor:
    return t if t.numel() < EVERY**2 else t[::EVERY]


def first_step(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The parameters after a step from zero moments; gradients are too small to be clipped."""
    return tuple(updated(judged(p), judged(g)) for p, g in zip(*halves(tensors), strict=True))


def updated(p: Tensor, g: Tensor) -> Tensor:
    """The stepped parameter, rounded stochastically: to nearest, small steps leave no error."""
    wide, g = (t.to(torch.promote_types(t.dtype, F32)) for t in (p, g))
    chance = torch.randint(1 << 16, p.shape, dtype=torch.int32, device=p.device)
    step = LR * g / (g.abs() + EPS)
    return stochastic(wide * (1 - LR * WEIGHT_DECAY) - step, chance, p.dtype)


def stepping(make: Make) -> Contender:
    """Steps its own parameters, with gradients that all contenders share."""

    def prepare(*tensors: Tensor) -> Run:
        params, grads = halves(tensors)
        copies = [p.clone().requires_grad_() for p in params]
        for p, g in zip(copies, grads, strict=True):
            p.grad = g
        return partial(stepped, make(copies), tuple(judged(p.detach()) for p in copies))

    return Contender(prepare)


def stepped(step: Run, params: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    step()
    return params


def operation(state: str, clips: bool = False) -> Operation:
    """Returns a step with our moments in `state`, and with the peers that support it.

    torch's moments have the parameters' dtype. torchao rounds bfloat16 stochastically, as we do.
    """
    peers: dict[str, Make] = {
        "float32": {"bitsandbytes": partial(bitsandbytes, name="AdamW")},
        "int8": {
            "bitsandbytes": bitsandbytes,
            "torchao": partial(torchao, bf16_stochastic_round=True),
        },
    }[state]
    peers = {"torch fused": torch_fused} | peers
    if clips:
        peers = {name: clipped(make) for name, make in peers.items()}
    fused = partial(ours, state_dtype=state, max_grad_norm=MAX_NORM if clips else None)

    def moved(mode: str, *tensors: Tensor) -> int:
        params, _ = halves(tensors)
        elements = sum(p.numel() for p in params)
        return bytes_moved(elements, params[0].itemsize, state, clips)

    return Operation(
        f"adamw {state}{' clipped' * clips}",
        inputs,
        first_step,
        moved,
        {name: stepping(make) for name, make in (peers | {"fusedops": fused}).items()},
    )


def case(step: Operation, dtype: torch.dtype, shape: tuple[int, int], clock: str) -> Case:
    return Case(step, FORWARD, dtype, shape, clock=clock)


IN_FLOAT32, IN_INT8 = STEPS = [operation("float32"), operation("int8")]
FLOAT32_CLIPPED, INT8_CLIPPED = CLIPPED_STEPS = [
    operation("float32", clips=True),
    operation("int8", clips=True),
]
BILLION = [
    case(step, dtype, BILLION_ELEMENTS, "device")
    for step, dtype in [
        (IN_FLOAT32, F32),
        (IN_INT8, F32),
        (IN_INT8, BF16),
        (FLOAT32_CLIPPED, F32),
        (INT8_CLIPPED, BF16),
    ]
]
SMALL = [case(step, F32, shape, "host") for step in STEPS + CLIPPED_STEPS for shape in LORA_SHAPES]
GPU_ROWS = BILLION + SMALL
