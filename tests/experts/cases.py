"""Shared helpers for tests of `experts`: arguments, options, quantized weights, comparisons."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fusedops.functional import QuantizedWeight, experts, quantize_experts
from fusedops.references.experts import experts_reference
from fusedops.testing import backends, check

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BACKENDS = [name for name in backends("experts") if name != "reference"]
GPT_OSS = {"interleaved": True, "limit": 1.25, "alpha": 1.702, "up_offset": 1.0}

KINDS: dict[str, dict[str, Any]] = {  # options, by what they are like
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh transposed": {"activation": "gelu_tanh", "transposed": True},
    "relu": {"activation": "relu"},
    "bilinear": {"activation": None},
    "gpt_oss": {**GPT_OSS, "transposed": True},
    "limited": {"limit": 1.25},
    "interleaved gelu": {"activation": "gelu", "interleaved": True, "up_offset": 0.5},
    "plain relu": {"gated": False, "activation": "relu"},
    "plain relu2": {"gated": False, "activation": "relu2"},
    "relu2": {"activation": "relu2"},
    "plain silu transposed": {"gated": False, "alpha": 1.702, "transposed": True},
    "linear": {"gated": False, "activation": None},
}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {  # format, and quantize_experts's options
    "int8": ("int8", {}),
    "int8 in groups": ("int8", {"group_size": 48}),
    "int4": ("int4", {}),
    "nf4": ("nf4", {}),
    "fp8": ("fp8", {}),
}
CASES = [(kind, name) for kind in KINDS for name in BACKENDS]


@dataclass(frozen=True)
class Shape:
    """tokens, k, E, H, I. sentinels: some choices are of no expert."""

    tokens: int
    k: int
    experts: int
    hidden: int
    inner: int
    bias: bool = False
    sentinels: bool = False
    weights: torch.dtype | None = field(default=None)

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.k} of {self.experts}, {self.hidden}x{self.inner}"
        return sizes + " bias" * self.bias + " sentinels" * self.sentinels


def inputs(
    shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 12, **options: Any
) -> tuple:
    """Returns hidden, index, weights, gate_up, down and both biases (or None), near 1."""
    draw = torch.Generator().manual_seed(seed)
    wide = shape.inner * (2 if options.get("gated", True) else 1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw)

    hidden = normal(shape.tokens, shape.hidden) + 0.25
    choices = shape.experts + shape.sentinels
    index = torch.rand(shape.tokens, choices, generator=draw).argsort(1)[:, : shape.k]
    weights = torch.rand(shape.tokens, shape.k, generator=draw) + 0.1
    gate_up = normal(shape.experts, wide, shape.hidden) / max(shape.hidden, 1) ** 0.5
    down = normal(shape.experts, shape.hidden, shape.inner) / max(shape.inner, 1) ** 0.5
    if options.get("transposed"):
        gate_up, down = (t.transpose(1, 2).contiguous() for t in (gate_up, down))
    biases: tuple = (None, None)
    if shape.bias:
        biases = normal(shape.experts, wide), normal(shape.experts, shape.hidden)

    def to(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(dtype)

    rest = to(gate_up), to(down), to(biases[0]), to(biases[1])
    return to(hidden), index.contiguous(), weights.to(shape.weights or dtype), *rest


def positional(run, *args, **options):
    """Calls `run` with the biases as the last positional arguments."""
    *first, gate_up_bias, down_bias = args
    return run(*first, gate_up_bias=gate_up_bias, down_bias=down_bias, **options)


def kernel_options(kind: str) -> tuple:
    """A kind's options in the order of the kernels' operators."""
    o = {"activation": "silu", "gated": True, "interleaved": False, "transposed": False}
    o |= {"limit": None, "alpha": 1.0, "up_offset": 0.0} | KINDS[kind]
    return o["activation"] or "none", *list(o.values())[1:]


OURS, REFERENCE = partial(positional, experts), partial(positional, experts_reference)


def reordered(seed: int):
    """The reference with tokens, hidden and inner features in another order.

    Its sums then have their terms in other orders.
    """

    def run(hidden, index, weights, gate_up, down, gate_up_bias, down_bias, **options):
        draw = torch.Generator().manual_seed(seed)
        axes = (2, 1) if options.get("transposed") else (1, 2)  # of outputs and inputs
        gated, inner = options.get("gated", True), down.shape[axes[1]]

        def order(n):
            return torch.randperm(n, generator=draw)

        tokens, columns, rows = order(len(hidden)), order(hidden.shape[1]), order(inner)
        if not gated:
            wide = rows
        elif options.get("interleaved"):
            wide = torch.stack([2 * rows, 2 * rows + 1], 1).flatten()
        else:
            wide = torch.cat([rows, rows + inner])
        gate_up = gate_up.index_select(axes[0], wide).index_select(axes[1], columns)
        down = down.index_select(axes[0], columns).index_select(axes[1], rows)
        y = experts_reference(
            hidden[tokens][:, columns],
            index[tokens],
            weights[tokens],
            gate_up,
            down,
            gate_up_bias=None if gate_up_bias is None else gate_up_bias[:, wide],
            down_bias=None if down_bias is None else down_bias[:, columns],
            **options,
        )
        return y[tokens.argsort()][:, columns.argsort()]

    return run


def quantized(kind: str, *weights: torch.Tensor) -> list[QuantizedWeight]:
    """Both weights as codes."""
    format, options = FORMATS[kind]
    return [quantize_experts(w.float(), format, **options) for w in weights]


def with_codes(run, kind: str, shape: Shape, wide: bool = True, **options: Any):
    """`run` as a function of the other arguments, with quantized weights of this shape.

    Made once, so that the exact results are of the same codes.
    """
    gated = {} if wide else {"gated": False}
    codes = quantized(kind, *inputs(shape, **gated)[3:5])

    def called(hidden, index, weights, gate_up_bias=None, down_bias=None):
        here = (w.to(hidden.device) for w in codes)
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return run(hidden, index, weights, *here, **biases, **options, **gated)

    return called


DRAWS = tuple(reordered(seed) for seed in range(6))


def compare(kind: str, backend: str, args: tuple) -> None:
    check(OURS, REFERENCE, args, backend, DRAWS, **KINDS[kind])
