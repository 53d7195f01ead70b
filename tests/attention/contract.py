"""attention calls for the tests in tests/contract."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from contract.family import Call, Family

from attention.cases import FEATURES, drawn, heads, options, orders
from fusedops.functional import attention, scaled_dot_product_attention
from fusedops.references.attention import attention_reference, cached_attention_reference


def drawn_with(names: tuple[str, ...], keys: int, batch: tuple[int, ...], tiny: bool) -> tuple:
    """q, k, v and the tensors among the keywords."""
    shape = (1, 2, 1, *batch, 4, 2) if tiny else (2, 4, 2, *batch, keys, 8)
    feature_kwargs = options(names, *shape[:2], *shape[3:5]).values()
    qkv = (t.contiguous() for t in heads(*shape))
    return *qkv, *(t for t in feature_kwargs if isinstance(t, torch.Tensor))


def call(*features: str, keys: int = 25, **kwargs: Any) -> Call:
    feature_kwargs = options(features, 2, 4, 6, keys)
    names = tuple(name for name, value in feature_kwargs.items() if isinstance(value, torch.Tensor))
    rest = {name: value for name, value in feature_kwargs.items() if name not in names}
    with_lse = partial(attention, return_lse=True)
    kwargs |= {"options": rest, "names": names, "kept": (0, 1, 2)}
    kwargs["draws"] = partial(in_other_orders, attention_reference)
    drawn = partial(drawn_with, features, keys)
    return Call("attention", with_lse, attention_reference, drawn, **kwargs)


def in_other_orders(run: Callable) -> tuple[Callable, ...]:
    return tuple(
        lambda q, k, v, order=order, **kwargs: run(q[..., order], k[..., order], v, **kwargs)
        for order in orders(torch.empty(8))
    )


def causal_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention_reference(q, k, v, causal=True, top_left=True)[0]


def drawn_sequences(batch: tuple[int, ...], tiny: bool) -> tuple:
    """q, k and v of three sequences, one of them empty, and where these end."""
    tokens, width = math.prod(batch) + 3, 2 if tiny else 8
    ends = torch.tensor([0, 2, 2, tokens])
    return *(drawn(i, tokens, heads, width) for i, heads in enumerate((4, 2, 2))), ends, ends


def varlen_call() -> Call:
    names = "cu_seqlens_q", "cu_seqlens_k"
    return replace(call("causal"), draw=drawn_sequences, names=names)


def cached_reference(q, k, v, *, seqused_k, **options):
    return cached_attention_reference(q, k, v, seqused_k, **options)


def drawn_cache(paged: bool, batch: tuple[int, ...], tiny: bool) -> tuple:
    """Two sequences, whose pages are of three keys."""
    queries, width = math.prod(batch), 2 if tiny else 8
    q = drawn(0, 2, 4, queries, width)
    used = torch.tensor([2, 6])
    if not paged:
        return q, drawn(1, 2, 2, 6, width), drawn(2, 2, 2, 6, width), used
    table = torch.tensor([[3, -1], [0, 2]])
    return q, drawn(1, 4, 3, 2, width), drawn(2, 4, 3, 2, width), used, table


def cache_call(paged: bool) -> Call:
    names = ("seqused_k", "block_table") if paged else ("seqused_k",)
    draws = partial(in_other_orders, cached_reference)
    return Call(
        "attention", partial(attention, return_lse=True), cached_reference,
        partial(drawn_cache, paged), options={"causal": True}, names=names, draws=draws,
    )  # fmt: skip


def sdpa_call() -> Call:
    sdpa = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    draws = partial(in_other_orders, causal_reference)
    return Call("attention", sdpa, causal_reference, partial(drawn_with, (), 7), draws=draws)


def kernels(device: torch.device) -> Iterator[tuple[str, tuple]]:
    q, k, v = (drawn(i, 1, 2, n, 8).to(device) for i, n in enumerate((5, 9, 9)))
    lengths, settings = (None, None, None, 5, 9), ([0.5, 0.0, 0.0], [-1, -1], True)
    args = q, k, v, None, None, *lengths, *settings
    yield "attention_forward", args
    out, lse = torch.ops.fusedops.attention_forward(*args)
    mask = [True, True, True, False, False]
    kept = *args[:8], out, lse, *args[8:]
    yield "attention_backward", (out, None, *kept, mask)


def paged_kernels(device: torch.device) -> Iterator[tuple[str, tuple]]:
    q, k, v = (drawn(i, 2, 2, n, 8).to(device) for i, n in enumerate((5, 9, 9)))
    used, table = torch.tensor([4, 16]).to(device), torch.tensor([[1, 1], [0, 1]]).to(device)
    yield "cached_attention_forward", (q, k, v, used, table, None, None, [0.5, 0.0], [-1, 0])


def captured(*features: str, queries: int, keys: int) -> Call:
    """With rows of 64 numbers."""
    shape = 2, 4, 2, queries, keys, 64

    def draw(batch: tuple[int, ...], tiny: bool) -> tuple:
        feature_kwargs = options(features, *shape[:2], *shape[3:5]).values()
        return *heads(*shape), *(t for t in feature_kwargs if isinstance(t, torch.Tensor))

    return replace(call(*features, keys=keys), draw=draw)


def captured_sequences() -> Call:
    """With the longest lengths, which the host would read."""
    varlen, longest = varlen_call(), {"max_seqlen_q": 70, "max_seqlen_k": 70}

    def draw(batch: tuple[int, ...], tiny: bool) -> tuple:
        return drawn_sequences((67,), tiny)

    return replace(varlen, draw=draw, options=varlen.options | longest)


EACH = {name: call(name) for name in FEATURES if name != "dropout"}
ALL = [name for name in EACH if name != "mask"]
FAMILY = Family(
    calls={"plain": call()} | EACH | {"all": call(*ALL)},
    more={
        "dropout": call("dropout"),
        "sequences": varlen_call(),
        "cache": cache_call(False),
        "pages": cache_call(True),
        "queries that see nothing": call("causal", keys=9),
        "queries that see nothing, all": call(*ALL, keys=9, still=(ALL.index("sinks"),)),
    },
    further={"scaled_dot_product_attention": sdpa_call()},
    kernels={"forward": kernels, "pages": paged_kernels},
    graphs={
        "causal": captured("causal", queries=70, keys=70),
        "all": captured(*ALL, queries=70, keys=90),
        "few queries": captured("causal", queries=2, keys=300),
        "sequences": captured_sequences(),
    },
    batches=((2,), (20,)),
    draws=32,
    symbolic=False,
    keeps_outputs=True,
    compilers=({"dynamic": True, "backend": "aot_eager"},),
)
