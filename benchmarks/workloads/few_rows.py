"""Times linear layers on 1 to 256 rows on a CPU: `python -m benchmarks few-rows`.

Reading the weight limits a call on so few rows. Each call takes the next weight of a ring that
holds four times the last-level cache, or 64 weights, so that large weights are read from memory.
F.linear, our linear, our quantized formats and, if installed, bitsandbytes' NF4 alternate with a
sum over as many bytes as the weight has, which shows how fast a plain loop reads memory.
"""

import copy
import importlib
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedops
from benchmarks.harness import report
from benchmarks.harness.timing import interleaved
from fusedops.demo.training import fast_dtype
from fusedops.functional import linear
from fusedops.measuring.ratios import Ratio, paired_ratio
from fusedops.references.quantized_linear import FORMATS

ROWS = 1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 32, 48, 64, 128, 256
SHAPES = (4096, 4096), (4096, 14336), (1024, 1024), (513, 1025)  # in_features, out_features
DTYPES = torch.float32, torch.bfloat16, torch.float16
EAGER, OURS, READ, BNB = "eager", "fusedops", "a sum of the weight's bytes", "bitsandbytes nf4"
CACHES, MOST = 4, 64  # times the last-level cache; weights in a ring
LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

# Speedups over eager that `linear` must show: dtype -> (rows, at least).
GOALS = {
    torch.float32: ((1, 1.3), (2, 2.0), (4, 2.0), (8, 2.0), (16, 2.0)),
    torch.bfloat16: ((1, 1.8), (2, 1.0), (4, 1.5), (8, 1.0), (16, 1.0)),
}

Call = Callable[[], object]


def measure(args: Namespace) -> int:
    """Times every row and writes `args.json`. Returns the exit status."""
    entries, goals = [], []
    shapes = ((64, 96),) if args.quick else SHAPES
    for (depth, columns), dtype in itertools.product(shapes, DTYPES):
        contenders = dict(_contenders(depth, columns, dtype, 2 if args.quick else MOST))
        for rows in ROWS[:2] if args.quick else ROWS:
            name = str(dtype).removeprefix("torch.")
            title = f"linear {name} [{rows}, {depth}] to {columns}, {args.allocator} allocator"
            seconds = _timed(contenders, torch.randn(rows, depth).to(dtype), args.seconds)
            ratio = {label: paired_ratio(seconds[EAGER], times) for label, times in seconds.items()}
            print(
                title, *(f"{label} {ratio[label]}" for label in ratio if label != EAGER), sep="\n  "
            )
            entries += [_row(title, label, seconds[label], ratio[label]) for label in seconds]
            for at, asked in GOALS.get(dtype, ()):
                if at == rows and (depth, columns) in SHAPES[:2]:
                    goals.append(report.goal(title, f"{OURS} over {EAGER}", asked, ratio[OURS]))
    report.save(args, entries, goals)
    return 0


def _row(title: str, contender: str, seconds: list[float], ratio: Ratio) -> dict:
    return {"title": title, "contender": contender, **report.times(seconds), "over_eager": ratio}


def _timed(
    contenders: dict[str, list[Callable[[Tensor], object]]], x: Tensor, budget_s: float
) -> dict[str, list[float]]:
    calls = {label: (_next_of(ring, x), nullcontext) for label, ring in contenders.items()}
    with torch.no_grad():
        return interleaved(calls, budget_s)


def _next_of(ring: list[Callable[[Tensor], object]], x: Tensor) -> Call:
    """A call with the next of the weights each time."""
    turns = itertools.cycle(ring)
    return lambda: next(turns)(x)


def _contenders(
    depth: int, columns: int, dtype: torch.dtype, limit: int
) -> Iterator[tuple[str, list[Callable[[Tensor], object]]]]:
    size = columns * depth * dtype.itemsize
    draw = partial(torch.randn, columns, depth)
    weights = [(draw() / depth**0.5).to(dtype) for _ in range(_count(size, limit))]
    yield EAGER, [partial(_product, F.linear, weight) for weight in weights]
    yield OURS, [partial(_product, linear, weight) for weight in weights]
    floats = [weight.flatten()[: size // 4 * 4 // dtype.itemsize] for weight in weights]
    yield READ, [partial(_read, weight.view(torch.float32)) for weight in floats]
    for name in FORMATS:
        count = _count(columns * depth * FORMATS[name].bits // 8, limit)
        layer = _quantized(draw() / depth**0.5, dtype, name)  # quantizing each takes minutes
        yield name, [copy.deepcopy(layer) for _ in range(count)]
    if dtype != torch.float16 and (bnb := _bitsandbytes()) is not None:
        yield BNB, [_nf4_of(bnb, draw() / depth**0.5) for _ in range(_count(size // 4, limit))]


def _product(function: Callable, weight: Tensor, x: Tensor) -> Tensor:
    return function(x, weight)


def _read(weight: Tensor, x: Tensor) -> Tensor:
    return weight.sum()


def _count(size: int, limit: int) -> int:
    """How many weights of so many bytes are CACHES times the last-level cache; 1 if unknown."""
    if not LAST_LEVEL.exists():
        return 1
    cache = int(LAST_LEVEL.read_text().strip().removesuffix("K")) * 1024
    return max(1, min(limit, -(-CACHES * cache // size)))


def _quantized(weight: Tensor, dtype: torch.dtype, name: str) -> nn.Module:
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight.data = weight
    model = nn.Sequential(layer.to(dtype))
    fusedops.quantize(model, name)
    return model[0]


def _bitsandbytes():
    """None also without the package `kernels`, where that brings a fast kernel for this CPU."""
    try:
        bnb = importlib.import_module("bitsandbytes")
        if bnb.functional.has_avx512bf16():
            importlib.import_module("kernels")
    except ImportError:
        return None
    return bnb


def _nf4_of(bnb, weight: Tensor) -> nn.Module:
    dtype = getattr(torch, fast_dtype())
    options = {"compute_dtype": dtype, "compress_statistics": False}
    layer = bnb.nn.LinearNF4(*weight.shape[::-1], bias=False, **options)
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    return layer.to("cpu")
