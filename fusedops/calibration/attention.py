"""The calls of attention that calibrate times, beside torch's scaled_dot_product_attention."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.calibration.choice import attention_kind
from fusedops.calibration.contest import Case, Contest, drawn_size
from fusedops.functional import attention

__all__ = ["case", "cases", "draw"]

DTYPES = torch.float32, torch.bfloat16, torch.float16
MASKS = "none", "causal", "bool", "numbers", "dropout"
DROPOUT = 0.1
# Queries and keys: generation, a short question to many keys, cross attention, self attention.
LENGTHS = (
    *((1, 16), (1, 64), (1, 256), (1, 1024), (1, 8192)),
    *((8, 32), (8, 256), (8, 2048), (32, 512), (64, 2048), (128, 32)),
    *((16, 16), (32, 32), (64, 64), (112, 112), (200, 200), (400, 400), (800, 800)),
)
# Heads and widths. Each length takes the pairs of one diagonal, causal calls those of both.
DIAGONALS = ((2, 32), (16, 128)), ((2, 128), (16, 32))
# The same where several heads of queries share one of keys: lengths; heads, of these each, widths.
GROUPED_LENGTHS = (
    (1, 64),
    (1, 1024),
    (8, 128),
    (24, 24),
    (24, 1024),
    (64, 64),
    (160, 160),
    (400, 400),
)
GROUPED_DIAGONALS = ((16, 2, 32), (16, 8, 128)), ((16, 2, 128), (16, 8, 32))
# Heads x queries x keys x width of the largest call, without its backward and with it. In float16
# torch has only slow loops on most CPUs.
MOST_WORK = {False: 3 * 2**25, True: 3 * 2**24}
MOST_WORK_IN_FLOAT16 = 2**22
MOST_DRAWN = 2**29


def cases() -> Iterator[Case]:
    for dtype, trains, mask in itertools.product(DTYPES, (False, True), MASKS):
        if mask == "dropout" and not trains:
            continue
        most = MOST_WORK_IN_FLOAT16 if dtype == torch.float16 else MOST_WORK[trains]
        for sizes in _sizes(mask == "causal"):
            if math.prod(sizes) // sizes[1] <= most:
                yield case(dtype, trains, mask, sizes)


def _sizes(causal: bool) -> Iterator[tuple[int, int, int, int, int]]:
    for number, (queries, keys) in enumerate(LENGTHS):
        if causal and queries != keys:
            continue
        for diagonal in DIAGONALS if causal else DIAGONALS[number % 2 :][:1]:
            for heads, width in diagonal:
                yield heads, 1, queries, keys, width
    for number, (queries, keys) in enumerate(GROUPED_LENGTHS):
        if causal and queries != keys:
            continue
        for heads, group, width in GROUPED_DIAGONALS[number % 2]:
            yield heads, group, queries, keys, width


def draw(random: Random) -> Case:
    """A call of any kind and sizes."""
    mask, dtype = random.choice(MASKS), random.choice(DTYPES)
    trains = mask == "dropout" or random.random() < 0.5
    while True:
        group = random.choice((1, 1, 1, 2, 4, 8))
        heads = group * drawn_size(random, 1, 64 // group)
        width = random.choice((32, 64, 80, 128, 256))
        queries = random.choice((1, drawn_size(random, 2, 32), drawn_size(random, 16, 4096)))
        keys = drawn_size(random, 16, 8192)
        if mask == "causal" or random.random() < 0.4:
            queries = keys = drawn_size(random, 16, 4096)
        if heads * queries * keys * width < MOST_DRAWN >> trains:
            return case(dtype, trains, mask, (heads, group, queries, keys, width))


def case(dtype: torch.dtype, trains: bool, mask: str, sizes: tuple[int, ...]) -> Case:
    """sizes: heads of queries, of them for each head of keys, queries, keys, width."""
    kind = attention_kind(dtype, trains, mask, sizes[1])
    return Case(kind, sizes, partial(_contest, dtype, trains, mask, *sizes))


def _contest(
    dtype: torch.dtype,
    trains: bool,
    mask: str,
    heads: int,
    group: int,
    queries: int,
    keys: int,
    width: int,
) -> Contest:
    random = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        """[1, heads, tokens, width] in models' memory order."""
        drawn = torch.randn(
            1, tokens, heads, width, generator=random, dtype=torch.float32, device="cpu"
        )
        return drawn.to(dtype).transpose(1, 2)

    q, k, v = draw(heads, queries), draw(heads // group, keys), draw(heads // group, keys)
    dout, bias = draw(heads, queries), None
    if mask == "bool":
        bias = (
            torch.rand(1, 1, queries, keys, generator=random, dtype=torch.float32, device="cpu")
            < 0.9
        )
    if mask == "numbers":
        bias = torch.randn(
            1, 1, queries, keys, generator=random, dtype=torch.float32, device="cpu"
        ).to(dtype)
    causal, dropout_p = mask == "causal", DROPOUT * (mask == "dropout")

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out = attention(q, k, v, causal=causal, bias=bias, dropout_p=dropout_p)
        assert isinstance(out, Tensor)  # without return_lse
        return out

    def torchs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, bias, dropout_p, is_causal=causal, enable_gqa=group > 1
        )

    def results(run, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dout: Tensor):
        if not trains:
            return partial(run, q, k, v, bias)
        inputs = tuple(t.detach().requires_grad_() for t in (q, k, v))
        return lambda: torch.autograd.grad(run(*inputs, bias), inputs, dout)

    def exact() -> Tensor | tuple[Tensor, ...]:
        added = bias.double() if mask == "numbers" and bias is not None else bias
        return results(torchs, q.double(), k.double(), v.double(), added, dout.double())()

    return Contest(
        results(ours, q, k, v, bias, dout),
        results(torchs, q, k, v, bias, dout),
        None if dropout_p else exact,
        trains,
    )
