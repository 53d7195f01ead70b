"""attention matches its reference on every backend."""

from functools import partial
from itertools import combinations

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted

import fusedops
from attention.cases import (
    F32,
    FEATURES,
    FLOATS,
    ON,
    TILES,
    compare,
    drawn,
    heads,
    on,
    options,
    results,
    runs,
)
from fusedops.functional import attention
from fusedops.references.attention import attention_reference
from fusedops.testing import poisoned, threads

# batch, q's heads, k's heads, queries, keys, width: odd, grouped, past a tile of the
# kernels in each direction, more queries than keys, several tiles of a CPU's, of which causal lines
# end within the last, a few queries
SHAPES = [
    (2, 3, 3, 7, 11, 24),
    (1, 4, 2, 70, 70, 64),
    (1, 2, 1, 130, 300, 40),
    (2, 2, 2, 65, 17, 16),
    (1, 2, 1, 70, 1060, 24),
    (1, 8, 2, 2, 530, 72),
]
attention_and_lse = partial(attention, return_lse=True)


def runs_in_time(backend, shape, **values):
    batch, q_heads, _, queries, keys, _ = shape
    large = batch * q_heads * queries * keys > 40000
    return runs(backend, **values) and not (interpreted(backend) and large)


@grid(ON, FLOATS, feature=[None, *FEATURES], shape=SHAPES, only=runs_in_time)
def test_forward_and_gradients(backend, dtype, products, feature, shape):
    batch, q_heads, kv_heads, queries, keys, width = shape
    if interpreted(backend) and q_heads == 8:  # half the heads, as many to a group
        q_heads, kv_heads = 4, kv_heads // 2
    kwargs = options([feature] if feature else [], batch, q_heads, queries, keys)
    qkv = heads(batch, q_heads, kv_heads, queries, keys, width, dtype=dtype)
    compare(qkv, backend, **kwargs)


@ON
@pytest.mark.parametrize("feature", [None, *(name for name in FEATURES if name != "dropout")])
def test_one_number(backend, feature):
    qkv = on(backend, *heads(1, 1, 1, 1, 1, 8))
    kwargs = options([feature] if feature else [], 1, 1, 1, 1)
    kwargs = {k: on(backend, v)[0] if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    cotangents = on(backend, drawn(4, 1, 1, 1, 8), drawn(5, 1, 1, 1))
    with fusedops.backend(backend), poisoned():
        actual = results(attention_and_lse, qkv, cotangents, **kwargs)
    expected = results(attention_reference, qkv, cotangents, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-6)


PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) != {"mask", "bias"}]


@grid(
    ON,
    TILES,
    pytest.mark.parametrize("pair", PAIRS, ids="+".join),
    shape=[(2, 4, 2, 33, 50, 32), (1, 4, 1, 3, 321, 32)],
    only=runs,
)
def test_pairs_of_features(backend, dtype, products, pair, shape):
    batch, q_heads, _, queries, keys, _ = shape
    kwargs = options(pair, batch, q_heads, queries, keys)
    compare(heads(*shape, dtype=dtype), backend, **kwargs)


@grid(ON, TILES, width=[1, 8, 31, 56, 80, 96, 128, 160, 256, 512], only=runs)
def test_widths(backend, dtype, products, width):
    compare(heads(1, 2, 1, 20, 24, width, dtype=dtype), backend, causal=True)
    compare(heads(1, 2, 1, 2, 24, width, dtype=dtype), backend, causal=True)


@grid(ON, TILES, only=runs)
def test_values_of_another_width(backend, dtype, products):
    compare(heads(1, 2, 2, 20, 24, 24, v_width=40, dtype=dtype), backend)
    compare(heads(1, 2, 2, 1, 24, 40, v_width=25, dtype=dtype), backend)


@grid(
    ON,
    mask=[{}, {"causal": True}, {"window": (3, 0)}, {"softcap": 3.0}],
    index=[torch.int32, torch.int64],
)
def test_sequences(backend, mask, index):
    """Lengths differ; one has no queries, one no keys, and tokens follow the last one."""
    cu_q = torch.tensor([0, 20, 20, 27, 60], dtype=index)
    cu_k = torch.tensor([0, 31, 40, 40, 73], dtype=index)
    q, k, v = (t[0].transpose(0, 1) for t in heads(1, 4, 2, 64, 75, 32))
    q, k, v, cu_q, cu_k = on(backend, q, k, v, cu_q, cu_k)
    mask = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **mask}
    longest = {"max_seqlen_q": 33, "max_seqlen_k": 33}
    cotangents = on(backend, drawn(4, 64, 4, 32), drawn(5, 4, 64) * 0)
    with fusedops.backend(backend), poisoned():
        actual = results(attention_and_lse, (q, k, v), cotangents, **mask)
        with_longest = results(attention_and_lse, (q, k, v), cotangents, **mask, **longest)
    expected = results(attention_reference, (q, k, v), cotangents, **mask)
    for ours, same, other in zip(actual, with_longest, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours, same)
    assert not actual[0][60:].count_nonzero() and not actual[2][60:].count_nonzero()
    assert not actual[3][73:].count_nonzero() and not actual[4][73:].count_nonzero()


@grid(ON, queries=[2, 40], sinks=[False, True])
def test_queries_that_see_nothing(backend, queries, sinks):
    q, k, v = heads(2, 2, 1, queries, 30, 16)
    seen = drawn(6, 2, 1, queries, 30) > 0
    seen[0, 0, 1], seen[1] = False, False
    kwargs = {"sinks": drawn(7, 2)} if sinks else {}
    compare((q, k, v), backend, bias=seen, **kwargs)
    additive = torch.where(seen, 0.0, -torch.inf)
    q, k, v, additive = on(backend, q, k, v, additive)
    cotangents = on(backend, torch.ones(2, 2, queries, 16), torch.zeros(2, 2, queries))
    with fusedops.backend(backend), poisoned():
        actual = results(attention_and_lse, (q, k, v), cotangents, bias=additive)
    assert all(t.isfinite().all() for t in (actual[0], *actual[2:]))
    assert not actual[0][1].count_nonzero() and not actual[2][1].count_nonzero()
    assert (actual[1][1] == -torch.inf).all()


@grid(ON, "queries,keys", [(2, 30), (40, 30), (2, 300)], sinks=[False, True])
def test_a_bias_of_the_least_number(backend, queries, keys, sinks):
    """Eager masks use it: a row with no other bias gets the mean of v, and its gradients."""
    qkv = on(backend, *heads(1, 2, 1, queries, keys, 16))
    bias = torch.zeros(queries, keys)
    bias[0], bias[1, 5:] = torch.finfo(F32).min, torch.finfo(F32).min
    bias, sink = on(backend, bias, torch.full((2,), torch.finfo(F32).min))
    kwargs = {"bias": bias} | ({"sinks": sink / 2} if sinks else {})
    cotangents = on(backend, drawn(4, 1, 2, queries, 16), drawn(5, 1, 2, queries))

    def run(function, *leaves):
        return results(function, leaves, cotangents, **kwargs)

    with fusedops.backend(backend), poisoned():
        actual = run(attention_and_lse, *qkv)
        plain = attention(*qkv, **kwargs)
    torch.testing.assert_close(plain, actual[0])
    if not sinks:
        torch.testing.assert_close(plain[0, :, 0], qkv[2].mean(2).expand(1, 2, -1)[0])
    torch.testing.assert_close(actual, run(attention_reference, *qkv), rtol=1e-4, atol=1e-5)


@grid(ON, "width,v_width", [(0, 8), (8, 0), (0, 0)], "queries,keys", [(3, 5), (40, 600)])
def test_no_width(backend, width, v_width, queries, keys):
    """With width 0, scores are 0 or outputs are empty."""
    qkv = on(backend, *heads(1, 2, 1, queries, keys, width, v_width=v_width))
    cotangents = on(backend, drawn(4, 1, 2, queries, v_width), drawn(5, 1, 2, queries))
    with fusedops.backend(backend), poisoned():
        actual = results(attention_and_lse, qkv, cotangents, scale=1.0)
    expected = results(attention_reference, qkv, cotangents, scale=1.0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@ON
@grid(shape=[(0, 2, 1, 3, 4, 8), (2, 2, 1, 0, 4, 8), (2, 2, 1, 3, 0, 8)])
def test_empty(backend, shape):
    batch, q_heads, _, queries, *_ = shape
    qkv = on(backend, *heads(*shape))
    lse_cotangent = torch.ones(batch, q_heads, queries)
    cotangents = on(backend, lse_cotangent[..., None].expand(-1, -1, -1, 8), lse_cotangent)
    with fusedops.backend(backend), poisoned():
        actual = results(attention_and_lse, qkv, cotangents)
    assert actual[0].shape == (batch, q_heads, queries, 8)
    assert not any(t.count_nonzero() for t in (actual[0], *actual[2:]))
    assert (actual[1] == -torch.inf).all()


@ON
@pytest.mark.parametrize("queries", [2, 40])
def test_a_window_as_wide_as_numbers_go_is_open(backend, queries):
    """No position overflows."""
    qkv = heads(1, 4, 2, queries, 37, 16, dtype=torch.float32)
    widest = 2**63 - 1
    windows = {(widest, widest): (-1, -1), (widest, 0): (-1, 0), (2**31 - 1, 3): (-1, 3)}
    for window, same in windows.items():
        with fusedops.backend(backend), poisoned():
            actual, expected = (attention(*qkv, window=w) for w in (window, same))
        assert torch.equal(actual, expected)


@grid(ON, TILES, queries=[2, 40], only=runs)
def test_strides(backend, dtype, products, queries):
    shape = 2, 4, 2, queries, 37, 16
    q, k, v = heads(*shape, dtype=dtype)
    packed = drawn(11, 2, 37, 4 + 2 + 2, 16).transpose(1, 2).to(dtype)
    cache = drawn(12, 2, 2, 64, 16).to(dtype)
    for views in (
        tuple(t.contiguous() for t in (q, k, v)),
        (packed[:, :4, :queries], packed[:, 4:6], packed[:, 6:]),
        (q, cache[:, :, :37], cache[:, :, 20:57]),
        (q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT),
        (q, k[:, :1].expand(-1, 2, -1, -1), v[:1].expand(2, -1, -1, -1)),
        (torch.cat([q.flatten(), q.flatten()[:1]])[1:].view(2, 4, queries, 16), k, v),
    ):
        compare(views, backend, causal=True)


@ON
@pytest.mark.parametrize("queries", [3, 40])
def test_masks_of_all_shapes(backend, queries):
    q, k, v = heads(2, 4, 2, queries, 50, 16)
    shapes = (50,), (queries, 1), (4, 1, 50), (2, 1, 1, 50), (1, 4, queries, 50), (1, 1, 1, 1)
    for shape in shapes:
        compare((q, k, v), backend, bias=drawn(13, *shape))
        compare((q, k, v), backend, bias=drawn(13, *shape) > -1.5)
    strided = drawn(14, 2, 4, 50, queries).mT
    compare((q, k, v), backend, bias=strided)
    compare((q, k, v), backend, bias=strided[:, :1] > 0)


@grid(ON, value=[torch.nan, torch.inf], queries=[2, 40, 130])
def test_nan_and_inf(backend, value, queries):
    """They stay in their rows and reach every query that sees them."""
    q, k, v = heads(1, 2, 1, queries, 300 if queries == 2 else 50, 16)
    q[0, 1, 1, 3] = value
    q, k, v = on(backend, q, k, v)
    with fusedops.backend(backend):
        out, lse = attention_and_lse(q, k, v)
    bad = out.isnan().all(-1)
    assert bad[0, 1, 1] and bad.sum() == 1 and lse[0, 1, 1].isnan()
    v[0, 0, 7, 2] = value
    with fusedops.backend(backend):
        out = attention(q[:, :1], k, v)
    assert not out[..., 2].isfinite().any() and out[..., :2].isfinite().all()


@grid(ON, TILES, only=runs)
def test_nan_stays_in_its_sequence(backend, dtype, products):
    """The sequence is longer than the next and does not fill its last block."""
    cu_q, cu_k = torch.tensor([0, 40, 46]), torch.tensor([0, 60, 81])
    q, k, v = (t[0].transpose(0, 1).clone() for t in heads(1, 2, 1, 81, 81, 24, dtype=dtype))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    cotangents = drawn(4, 46, 2, 24).to(dtype), drawn(5, 2, 46)
    runs = []
    for bad in (False, True):
        args = [t.clone() for t in (q[:46], k, v)]
        for t in args if bad else ():
            t[20:36] = torch.nan
        moved = on(backend, *args), on(backend, *cotangents)
        kwargs = dict(zip(lengths, on(backend, *lengths.values()), strict=True))
        with fusedops.backend(backend), poisoned():
            out, lse, dq, dk, dv = results(attention_and_lse, *moved, **kwargs)
        runs.append((out[40:], lse[:, 40:], dq[40:], dk[60:], dv[60:]))
        assert out[:40].isnan().any() == bad
    assert all(map(torch.equal, *runs))


@grid(ON, past=[6, 0], dtype=[F32, torch.float64])
def test_a_token_past_the_last_sequence_has_no_sink(backend, past, dtype):
    """Its lse is -inf, and the sinks' gradient does not contain its lse's."""
    qkv = heads(1, 2, 1, 46, 46, 24, dtype=dtype)
    q, k, v = (t[0].transpose(0, 1).clone() for t in qkv)
    cu_seqlens = torch.tensor([0, 30, 46 - past])
    sinks = drawn(8, 2).to(dtype)
    cotangents = drawn(4, 46, 2, 24).to(dtype), drawn(5, 2, 46).to(dtype)
    by_backend = []
    for name in (backend, "reference"):
        args, kwargs = on(backend, q, k, v, sinks), {"cu_seqlens_q": on(backend, cu_seqlens)[0]}
        with fusedops.backend(name):
            by_backend.append(results(with_sinks, args, on(backend, *cotangents), **kwargs))
    torch.testing.assert_close(*by_backend, rtol=1e-4, atol=1e-5)
    _, lse, *gradients = by_backend[0]
    assert lse[:, 46 - past :].eq(-torch.inf).all() and not lse[:, : 46 - past].isinf().any()
    assert gradients[-1].isfinite().all()


def test_second_derivatives_where_a_token_sees_no_key():
    """Those of sinks were NaN."""
    qkv = heads(1, 2, 2, 7, 7, 3, dtype=torch.float64)
    q, k, v = (t[0].transpose(0, 1).clone().requires_grad_() for t in qkv)
    sinks = drawn(8, 2).double().requires_grad_()

    def seen(q, k, v, sinks):
        out, lse = with_sinks(q, k, v, sinks, torch.tensor([0, 3, 5]))
        return out, lse[:, :5]

    assert torch.autograd.gradgradcheck(seen, (q, k, v, sinks))


def with_sinks(q, k, v, sinks, cu_seqlens_q):
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_q}
    return attention(q, k, v, sinks=sinks, return_lse=True, **lengths)


@grid(ON, TILES, queries=[2, 40], only=runs)
def test_a_mask_hides_nan(backend, dtype, products, queries):
    """A batch's padding may contain NaN."""
    q, k, v = heads(2, 2, 1, queries, 50, 16, dtype=dtype)
    seen = (torch.arange(50) < torch.tensor([[30], [50]]))[:, None, None]
    expected = attention(*on(backend, q, k, v), bias=on(backend, seen)[0], return_lse=True)
    k[0, :, 30:] = torch.nan
    with fusedops.backend(backend):
        actual = attention(*on(backend, q, k, v), bias=on(backend, seen)[0], return_lse=True)
    torch.testing.assert_close(actual, expected)


@ON
def test_large_scores(backend):
    q, k, v = heads(1, 2, 1, 20, 300, 16)
    compare((q * 40, k * 5, v), backend)
    compare((q[:, :, :2] * 40, k * 5, v), backend)
    compare((-q.abs(), k.abs() + 40, v), backend)  # none above -300
    compare((q * 40, k * 5, v), backend, scale=-0.25)


@ON
def test_the_same_bits_each_time_and_whatever_the_threads(backend):
    shape = (1, 2, 1, 20, 40, 16) if interpreted(backend) else (2, 4, 2, 150, 300, 32)
    qkv = on(backend, *heads(*shape))
    outer = *shape[:2], shape[3]
    cotangents = on(backend, drawn(4, *outer, shape[5]), drawn(5, *outer))
    with fusedops.backend(backend):
        first = results(attention_and_lse, qkv, cotangents, causal=True)
        for number in (1, 2, 3):
            with threads(number):
                again = results(attention_and_lse, qkv, cotangents, causal=True)
            assert all(map(torch.equal, first, again))


@ON
def test_sinks_without_lse(backend):
    """The sinks' gradient equals that of an lse without a sink."""
    q, k, v, sinks = on(backend, *heads(2, 4, 2, 20, 30, 16), drawn(8, 4))
    sinks.requires_grad_()
    with fusedops.backend(backend):
        out = attention(q, k, v, sinks=sinks)
        (actual,) = torch.autograd.grad(out.sum(), sinks)
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
        (expected,) = torch.autograd.grad(out.sum() + 0 * lse.sum(), sinks)
    assert torch.equal(actual, expected)


def test_keys_split_among_threads():
    """Joins the parts of a long cache, with a window, a sink, and masked parts."""
    q, k, v = heads(1, 2, 1, 2, 5000, 32)
    masked = {"bias": torch.arange(5000) > 4000}
    for kwargs in ({}, {"window": (40, 0)}, {"sinks": drawn(8, 2)}, {"causal": True}, masked):
        alone = attention(q, k, v, **kwargs)
        with threads(4):
            split = attention(q, k, v, **kwargs)
        assert torch.equal(split, alone)
        torch.testing.assert_close(split, attention_reference(q, k, v, **kwargs)[0])
