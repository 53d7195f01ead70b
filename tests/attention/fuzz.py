"""Random attention calls for tests/contract/test_fuzz.py."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from contract.fuzzing import (
    LAYOUTS,
    NOT_FLOATS,
    RECEIVED,
    Call,
    Drawn,
    Fuzz,
    Redrawn,
    Rounded,
    assert_as_good,
    attempt,
    drawn,
    evaluated,
    results,
    right_or_refused,
)
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedops
from attention.cases import BF16, F32, by_heads
from fusedops import _C
from fusedops.functional import scaled_dot_product_attention
from fusedops.references.attention import attention_reference
from fusedops.testing import backends, poisoned

OPS = ["attention", "scaled_dot_product_attention"]
SLOW = [] if torch.cuda.is_available() else ["triton"]  # the interpreter
BACKENDS = [name for name in backends("attention") if name not in SLOW]
MOST = 1 << 17  # multiply-adds of q k^T

F16, F64 = torch.float16, torch.float64
DTYPES = st.sampled_from([F32, BF16, F16, F32, BF16, F16, F64])
# The first of a list is the simplest, to which hypothesis comes back often: nothing degenerate.
LENGTHS = st.sampled_from([5, 17, 40, 3, 65, 2, 33, 8, 16, 1, 70, 130, 64, 257, 0, 1031, 4099])
WIDTHS = st.sampled_from([8, 5, 40, 3, 16, 31, 2, 64, 32, 1, 65, 80, 127, 128, 130, 0])
HEADS = st.sampled_from([(4, 2), (2, 2), (3, 1), (1, 1), (6, 2)] * 3 + [(0, 0), (0, 1)])  # q's, k's
SIDES = st.sampled_from([5, 2, 0, -1, 1, 40, -1, 2**40])  # of a window
SCALES = st.sampled_from([None, 0.05, None, -0.5, 2.0, None, 0.05, 0.0])
DROPOUTS = st.sampled_from([0.0, 0.0, 0.3] * 4 + [1.0])
KEPT = {"out": slice(1), "lse": slice(1, 2), "both": slice(2)}

# Eager code multiplies what is hidden by 0, where a NaN stays one; the kernels skip some of it.
FINITE = {"normal", "far from zero", "zeros", "constant", "small", "tiny", "denormal"}


@dataclass(frozen=True)
class Bias(Drawn):
    """A third is hidden, and some rows as a whole: False in a mask, else this number."""

    hidden: float = 0.0

    def tensor(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed)

        def fill(shape):
            t, row = (
                torch.randn(s, generator=draw) for s in (shape, (*shape[:-1], 1)[-len(shape) :])
            )
            seen = (t < 0.5) & (row < 1.3)
            return seen if self.dtype == torch.bool else t.where(seen, self.hidden).to(self.dtype)

        return LAYOUTS[self.layout if self.shape else "contiguous"](fill, self.shape)


@dataclass(frozen=True)
class Ends(Drawn):
    """Draws cu_seqlens."""

    ends: tuple[int, ...] = ()

    def tensor(self) -> torch.Tensor:
        return torch.tensor([0, *self.ends], dtype=self.dtype)


@dataclass(frozen=True)
class AttentionCall(Call):
    """A call on a CPU that multiplies bfloat16 as such, or not; by itself it takes the faster."""

    bfloat16_products: bool | None = None


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = MOST) -> AttentionCall:
    """Draws a call that the function's docstring allows."""
    dtype, width, v_width, (heads, kv_heads) = (draw(s) for s in (DTYPES, WIDTHS, WIDTHS, HEADS))
    ours = op == "attention"
    varlen = ours and draw(st.integers(0, 3)) == 3
    lead = (
        (1,)
        if varlen
        else draw(st.sampled_from([(2,), (1,), (3,)] * 4 + [(0,)] if ours else LEADS))
    )
    max_size //= max(1, math.prod(lead) * heads * max(width, v_width))
    queries = min(draw(LENGTHS), max_size)
    keys = min(draw(LENGTHS), max_size // max(1, queries))
    options: dict[str, Any] = {
        "scale": draw(SCALES) if width else 0.5,
        "dropout_p": draw(DROPOUTS),
        "bias": None if varlen else draw(st.none() | biases((*lead, heads, queries, keys), dtype)),
    }
    if ours:
        options |= draw(options_beyond_torchs(heads, keys, dtype))
        options |= draw(sequences(queries, keys, options["sinks"] is not None)) if varlen else {}
    else:
        bias = options["attn_mask"] = options.pop("bias")
        options["is_causal"] = bias is None and draw(st.booleans())
        options["enable_gqa"] = heads != kv_heads or draw(st.booleans())
    shapes = (
        (*lead, h, s, w)
        for h, s, w in [(heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, v_width)]
    )
    tame, hides = draw(st.booleans()), varlen or HIDE & {k for k, v in options.items() if v}
    arguments = {}
    for name, shape in zip(NAMES[op], shapes, strict=True):
        t = draw(drawn((shape[2], shape[1], shape[3]) if varlen else shape, dtype))
        arguments[name] = (
            replace(t, values="normal") if tame or (hides and t.values not in FINITE) else t
        )
    arguments |= options
    leaves = [k for k, v in arguments.items() if isinstance(v, Drawn) and v.dtype.is_floating_point]
    grads = draw(st.just(set(leaves)) | st.sets(st.sampled_from(leaves)))
    if arguments.get("kept") == "lse":
        grads -= {"v"}
    received = draw(st.sampled_from(list(RECEIVED)))
    products = draw(st.sampled_from([None, True, False]))
    return AttentionCall(op, arguments, frozenset(grads), received, bfloat16_products=products)


NAMES = {"attention": ("q", "k", "v"), "scaled_dot_product_attention": ("query", "key", "value")}
LEADS = [(2,), (), (1,), (2, 2), (1, 3)] * 3 + [(0,)]
HIDE = {"causal", "is_causal", "window", "bias", "attn_mask"}


@st.composite
def biases(draw: st.DrawFn, scores: tuple[int, ...], dtype: torch.dtype) -> Bias:
    """Draws a bias whose shape broadcasts to the scores."""
    shape = tuple(size if draw(st.booleans()) else 1 for size in scores)
    shape = shape[draw(st.integers(0, len(shape))) :]
    kind = draw(st.sampled_from([torch.bool, dtype, F32]))
    hidden = draw(st.sampled_from([0.0, -torch.inf, max(torch.finfo(t).min for t in (dtype, F32))]))
    return Bias(shape, kind, draw(st.sampled_from(list(LAYOUTS))), "", draw(SEEDS), hidden)


SEEDS = st.integers(0, 2**16)


@st.composite
def options_beyond_torchs(draw, heads, keys, dtype) -> dict[str, Any]:
    sinks = drawn((heads,), draw(st.sampled_from([F32, dtype])))
    sinks = sinks.filter(lambda t: t.values in FINITE)  # lse at an infinite one is infinite or NaN
    return {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(SIDES, SIDES)),
        "softcap": draw(st.sampled_from([None, None, 0.5, 30.0])),
        "sinks": draw(st.none() | sinks),
        "kept": draw(st.sampled_from(["both", "out", "lse" if keys else "both"])),
    }


@st.composite
def sequences(draw: st.DrawFn, queries: int, keys: int, whole: bool) -> dict[str, Any]:
    """Draws sequences: some are empty, and some tokens may follow the last one."""
    count = draw(st.integers(int(whole), 4))
    arguments: dict[str, Any] = {}
    for name, tokens in (("q", queries), ("k", keys)):
        ends = sorted(tokens - draw(st.integers(0, tokens)) for _ in range(count))
        if whole:
            ends[-1] = tokens
        arguments[f"cu_seqlens_{name}"] = Ends(
            (count + 1,), draw(st.sampled_from([torch.int32, torch.int64])), ends=tuple(ends)
        )
        longest = max((b - a for a, b in zip([0, *ends], ends, strict=False)), default=0)
        arguments[f"max_seqlen_{name}"] = draw(st.sampled_from([None, longest, tokens]))
    return arguments


def kept_of(function):
    def run(kept, **options):
        return function(**options)[KEPT[kept]]

    return run


def with_lse(**options):
    return fusedops.functional.attention(**options, return_lse=True)


def without_lse(kept, **options):
    if kept == "out":
        return fusedops.functional.attention(**options)
    return with_lse(**options)[KEPT[kept]]


def torchs_reference(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if enable_gqa and value.shape[-3] == 0 and key.shape[-3] + query.shape[-3]:
        return torchs(query=query, key=key, value=value, attn_mask=attn_mask, enable_gqa=True)
    query, key, value = as_broadcast(query, key, value, enable_gqa)
    whole = (*query.shape[:-1], key.shape[-2])
    bias = None if attn_mask is None else in_four(attn_mask.expand(whole))
    q, k, v = map(in_four, (query, key, value))
    kwargs = {"causal": is_causal, "scale": scale, "dropout_p": dropout_p, "top_left": True}
    out, _ = attention_reference(q, k, v, bias=bias, **kwargs)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def as_broadcast(query, key, value, enable_gqa):
    """Returns all tensors with their broadcast batch and heads."""
    end = -3 if enable_gqa else -2
    tensors = query, key, value
    batch = torch.broadcast_shapes(*(t.shape[:end] for t in tensors))
    tensors = [t.expand(*batch, *t.shape[end:]) for t in tensors]
    if not enable_gqa or key.shape[-3] == value.shape[-3]:
        return tensors
    return [t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in tensors]


def in_four(t):
    return t.reshape(math.prod(t.shape[:-3]), *[1] * (3 - t.dim()), *t.shape[-3:])


def torchs(**options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(**options)


OURS = {"attention": without_lse, "scaled_dot_product_attention": scaled_dot_product_attention}
REFERENCES = {
    "attention": kept_of(attention_reference),
    "scaled_dot_product_attention": torchs_reference,
}


class Terms(Rounded):
    """The terms of products move too, and those of the sum in the gradient of softmax."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket == torch.ops.aten.bmm:
            terms = self._moved(args[0][..., None] * args[1][:, None])
            return self._moved(terms.sum(-2))
        if func.overloadpacket == torch.ops.aten._softmax_backward_data:
            grad, p, dim, _ = args
            weighted = self._moved(self._moved(grad * p).sum(dim, True))
            return self._moved(p * self._moved(grad - weighted))
        return super().__torch_dispatch__(func, types, args, kwargs)


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Asserts that each head is as accurate as the reference's."""
    tensors, reference = call.made(), REFERENCES[call.op]
    exactly, eager, exact = evaluated(call, ours, reference)
    sizes = [size for name in NAMES[call.op] for size in tensors[name].shape]
    if call.op != "attention" and not call.arguments["dropout_p"] and all(sizes):
        exact |= results(torchs, call, exactly)
    assert {k: t.shape for k, t in ours.items()} == {k: t.shape for k, t in eager.items()}
    dtype = tensors[NAMES[call.op][0]].dtype

    def rounded(key: str) -> Iterator[torch.Tensor]:
        for seed in range(4):
            with Terms(torch.promote_types(dtype, F32), seed):
                yield by_heads(results(reference, call, exactly)[key])
            if dtype in (BF16, F16):
                with Redrawn(seed):
                    yield by_heads(results(reference, call)[key].double())

    heads = ({k: by_heads(t) for k, t in of.items()} for of in (ours, eager, exact))
    assert_as_good(*heads, rounded)


@contextmanager
def products(kind: bool | None):
    _C.bfloat16_products(kind)
    yield
    _C.bfloat16_products(None)


def ours(call: AttentionCall, backend: str) -> dict | Exception:
    """Returns our result or error."""
    with products(call.bfloat16_products), fusedops.backend(backend), poisoned():
        return attempt(OURS[call.op], call)


# What the fuzz has found, and what it draws too rarely.
EXAMPLES = {
    "queries that see nothing beside some that see a part of the keys": AttentionCall(
        "attention",
        {
            "q": Drawn((2, 1, 65, 1)),
            "k": Drawn((2, 1, 2, 1)),
            "v": Drawn((2, 1, 2, 1)),
            "causal": True,
            "kept": "both",
        },
        frozenset({"q", "k", "v"}),
    ),
    "so large that a rounding of the scaled score is past exp": AttentionCall(
        "attention",
        {
            "q": Drawn((1, 1, 1, 2), BF16),
            "k": Drawn((1, 1, 1, 2), BF16, values="huge"),
            "v": Drawn((1, 1, 1, 1), BF16),
            "kept": "both",
        },
        frozenset({"q", "k", "v"}),
    ),
    "a NaN among the keys and an infinite value, lse alone": AttentionCall(
        "attention",
        {
            "q": Drawn((1, 2, 40, 9)),
            "k": Drawn((1, 1, 90, 9), values="one NaN"),
            "v": Drawn((1, 1, 90, 5), values="one inf"),
            "kept": "lse",
        },
        frozenset({"q", "k"}),
    ),
    "no head, no width, no batch dimension": AttentionCall(
        "scaled_dot_product_attention",
        {
            "query": Drawn((0, 3, 0)),
            "key": Drawn((0, 4, 0)),
            "value": Drawn((0, 4, 2)),
            "scale": 1.0,
        }
        | {"dropout_p": 0.0},
    ),
}


EXAMPLES = {
    f"{why}{', bfloat16 products' * kind}": replace(call, bfloat16_products=kind)
    for why, call in EXAMPLES.items()
    for kind in (False, True)
}


@st.composite
def broken(draw: st.DrawFn, op: str) -> AttentionCall:
    """Draws a call with one wrong or undocumented argument."""
    call = draw(calls(op, 512))
    name = draw(st.sampled_from(sorted(call.arguments.keys() - {"kept"})))
    arguments = call.arguments | {name: draw(st.sampled_from(wrong_values(name, call)))}
    if name == "attn_mask":
        arguments["is_causal"] = False  # torch's own function judges both
    return AttentionCall(op, arguments)


def wrong_values(name: str, call: Call) -> list[Any]:
    """Returns invalid values to try in place of a valid one."""
    if name in WRONG:
        return WRONG[name]
    if name.startswith("cu_seqlens"):
        last = call.arguments["q" if name.endswith("q") else "k"].shape[0] + 1
        ends = [(last,), (-1,), (2, 1), (2**40,), (0,) * 9]
        wrong: list[Any] = [Ends((), torch.int64, ends=e) for e in ends]
        return [*wrong, Drawn((2,)), Drawn((), torch.int64), Drawn((0,), torch.int32), [0, 1], None]
    like = call.arguments[name] or Drawn((2, 3))
    shape = like.shape
    others = [(), (1,), (*shape, 1), (1, *shape), shape[:-1], tuple(s + 1 for s in shape)]
    others += [(*shape[:i], shape[i] + 1, *shape[i + 1 :]) for i in range(len(shape))]
    wrong = [Drawn(s, like.dtype) for s in others if s != shape]
    wrong += [Drawn(shape, dtype) for dtype in [*NOT_FLOATS, F16, F64] if dtype != like.dtype]
    return [*wrong, 1, "q", torch.zeros(shape, device="meta"), None]


LENGTH = ["1", 1.5, -1, 2**70]
WRONG = {
    "causal": [None, "yes", 1.5],
    "is_causal": ["yes"],
    "enable_gqa": [False],
    "window": [(-2, 0), (0, -5), (1,), (1, 2, 3), 3, "ab", (1.5, 0), (None, 0), (2**70, 0)],
    "softcap": [0.0, -1.0, math.nan, math.inf, "1", 1j],
    "scale": ["1", 1j, math.nan],
    "dropout_p": [-0.1, 1.1, math.nan, math.inf, "0.5", None],
    "max_seqlen_q": LENGTH,
    "max_seqlen_k": LENGTH,
}


def refused(call: Call, error: Exception) -> None:
    assert "attention" in str(error), error


FUZZ = Fuzz(
    calls=calls,
    backends=dict.fromkeys(OPS, BACKENDS),
    compare=compare,
    run=ours,
    mistakes=broken,
    judge=right_or_refused(compare, refused),
    examples=EXAMPLES,
    example_backends=BACKENDS,
)
