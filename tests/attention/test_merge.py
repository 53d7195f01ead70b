"""merge_attention over parts of the keys matches attention over all keys."""

import re

import pytest
import torch
from axes import grid

from attention.cases import drawn, heads
from fusedops.functional import attention, merge_attention
from fusedops.references.attention import attention_reference
from fusedops.testing import check

CUTS = {"one": [(0, 9)], "two": [(0, 4), (4, 9)], "four": [(0, 1), (1, 1), (1, 6), (6, 9)]}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def merged(q, k, v, cuts, bias=None, sinks=None, **kwargs):
    """Of q over parts of k and v. The first part has the sinks."""
    parts = [
        attention(
            q, k[:, :, a:b], v[:, :, a:b], return_lse=True,
            bias=None if bias is None else bias[..., a:b],
            sinks=sinks if i == 0 else None, **kwargs,
        )
        for i, (a, b) in enumerate(cuts)
    ]  # fmt: skip
    return merge_attention(*zip(*parts, strict=True))


def reference(*outs_and_lses):
    """By softmax over the parts; every query is seen by one of them."""
    half = len(outs_and_lses) // 2
    outs, lses = (torch.stack(t) for t in (outs_and_lses[:half], outs_and_lses[half:]))
    wide = torch.promote_types(lses.dtype, torch.float32)
    weights = lses.to(wide).softmax(0)[..., None].to(outs.dtype)
    return (outs * weights).sum(0), lses.to(wide).logsumexp(0)


@grid(dtype=DTYPES, parts=[2, 5])
def test_it_is_as_accurate_as_eager(dtype, parts):
    outs = tuple(drawn(i, 2, 3, 33, 40).to(dtype) for i in range(parts))
    lses = tuple(4 * drawn(9 + i, 2, 3, 33) for i in range(parts))

    def merge(*outs_and_lses):
        return merge_attention(outs_and_lses[:parts], outs_and_lses[parts:])

    check(merge, reference, (*outs, *lses), "cpu")


@pytest.mark.parametrize("cuts", CUTS)
def test_parts_are_as_accurate_as_all_keys_at_once(cuts):
    qkv = heads(2, 4, 2, 6, 9, 8)
    check(lambda q, k, v: merged(q, k, v, CUTS[cuts]), attention_reference, qkv, "cpu")


def test_bias_softcap_and_sinks():
    qkv, bias, sinks = heads(2, 4, 2, 6, 9, 8), drawn(4, 2, 4, 6, 9), drawn(5, 4)

    def over_parts(q, k, v, bias, sinks):
        return merged(q, k, v, CUTS["four"], bias=bias, sinks=sinks, softcap=2.0)

    def over_all(q, k, v, bias, sinks):
        return attention_reference(q, k, v, bias=bias, sinks=sinks, softcap=2.0)

    check(over_parts, over_all, (*qkv, bias, sinks), "cpu")


def test_causal_blocks_as_ranks_have_them():
    """A block of queries sees earlier blocks of keys whole, its own causally, later ones not."""
    qkv, blocks = heads(2, 4, 2, 12, 12, 8), [(0, 4), (4, 8), (8, 12)]

    def over_blocks(q, k, v):
        merged = []
        for i, (a, b) in enumerate(blocks):
            parts = [
                attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=i == j, return_lse=True)
                for j, (c, d) in enumerate(blocks[: i + 1])
            ]
            merged.append(merge_attention(*zip(*parts, strict=True)))
        out, lse = zip(*merged, strict=True)
        return torch.cat(out, 2), torch.cat(lse, 2)

    check(over_blocks, lambda *t: attention_reference(*t, causal=True), qkv, "cpu")


def test_packed_sequences():
    """Heads last in outs, first in lses. The parts are keys of another length per sequence."""
    cu = torch.tensor([0, 3, 7])
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    q, k, v = (drawn(i, 7, h, 8) for i, h in enumerate((4, 2, 2)))
    parts = [torch.tensor([0, 3, 4]), torch.tensor([1, 2, 5, 6])]
    part_lengths = [torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4])]

    def over_parts(q, k, v):
        partial_results = [
            attention(q, k[at], v[at], return_lse=True, cu_seqlens_q=cu, cu_seqlens_k=of)
            for at, of in zip(parts, part_lengths, strict=True)
        ]
        return merge_attention(*zip(*partial_results, strict=True))

    check(over_parts, lambda *t: attention_reference(*t, **lengths), (q, k, v), "cpu")


@grid(packed=[False, True], dtype=[torch.float32, torch.bfloat16])
def test_the_memory_order_is_attention_s(packed, dtype):
    """So that heads are joined without a copy."""
    if packed:
        cu = torch.tensor([0, 3, 7])
        q, k, v = (drawn(i, 7, 4, 8).to(dtype) for i in range(3))
        out, lse = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    else:
        q, k, v = (drawn(i, 2, 7, 4, 8).to(dtype).transpose(1, 2) for i in range(3))
        out, lse = attention(q, k, v, return_lse=True)
    both, _ = merge_attention([out, out], [lse, lse])
    assert both.dtype == dtype and both.stride() == out.stride()
    joined = both if packed else both.transpose(1, 2)
    assert joined.flatten(-2).data_ptr() == both.data_ptr()


def test_queries_that_a_part_or_no_part_sees():
    """Their part's output, which may be NaN, and its gradient do not count."""
    outs = [drawn(i, 1, 1, 3, 4) for i in range(2)]
    lses = [drawn(2 + i, 1, 1, 3) for i in range(2)]
    lses[0][..., :2] = lses[1][..., 1] = -torch.inf
    outs[0][..., :2, :] = torch.nan
    tensors = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = merge_attention(outs, lses)
    torch.testing.assert_close((out[0, 0, 0], lse[0, 0, 0]), (outs[1][0, 0, 0], lses[1][0, 0, 0]))
    assert not out[0, 0, 1].any() and lse[0, 0, 1] == -torch.inf
    grads = torch.autograd.grad(out.sin().sum() + lse[lse > -torch.inf].sum(), tensors)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][..., :2, :].any() and not grads[1][..., 1, :].any()
    assert not grads[2][..., :2].any()
    assert grads[3][0, 0].tolist()[:2] == [1, 0]


def test_nan_stays_in_its_query():
    outs, lses = [drawn(i, 1, 2, 3, 4) for i in range(2)], [drawn(2, 1, 2, 3) for _ in range(2)]
    lses[1][0, 1, 2] = torch.nan
    out, lse = merge_attention(outs, lses)
    assert out.isnan().sum() == 4 and out[0, 1, 2].isnan().all()
    assert lse.isnan().sum() == 1 and lse[0, 1, 2].isnan()


def test_large_sums():
    """exp of them alone would be infinite, or 0."""
    outs = [drawn(i, 1, 1, 2, 4) for i in range(2)]
    for large in (1e4, -1e4):
        out, lse = merge_attention(outs, [torch.full((1, 1, 2), large)] * 2)
        torch.testing.assert_close(out, (outs[0] + outs[1]) / 2)
        torch.testing.assert_close(lse, torch.full((1, 1, 2), large + 0.6931472))


def test_gradients_of_gradients():
    outs = [drawn(i, 1, 2, 3, 2).double().requires_grad_() for i in range(2)]
    lses = [drawn(2 + i, 1, 2, 3).double().requires_grad_() for i in range(2)]

    def merge(a, b, c, d):
        return merge_attention((a, b), (c, d))

    assert torch.autograd.gradcheck(merge, (*outs, *lses))
    assert torch.autograd.gradgradcheck(merge, (*outs, *lses))


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "text"),
    [
        ([], [], ValueError, "at least one, got 0 and 0"),
        ([OUT, "out"], [LSE] * 2, TypeError, "outs[1] must be a tensor, got str"),
        ([OUT[0, 0]], [LSE], RuntimeError, "outs must be [B, Hq, Sq, Dv] or [tokens, Hq, Dv]"),
        ([OUT, OUT.half()], [LSE] * 2, RuntimeError, "outs[1] must be torch.float32"),
        ([OUT], [LSE.mT], RuntimeError, "lses[0] must be torch.float32 [1, 2, 3]"),
        ([OUT], [LSE.to("meta")], RuntimeError, "on cpu, got torch.float32 [1, 2, 3] on meta"),
        ([OUT.int()], [LSE], RuntimeError, "must be floating-point tensors"),
    ],
)
def test_what_does_not_fit(outs, lses, error, text):
    with pytest.raises(error, match=f"merge_attention: .*{re.escape(text)}"):
        merge_attention(outs, lses)
