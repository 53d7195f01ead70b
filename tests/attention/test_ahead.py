"""Triton attention's forward loop for sm_90 (ahead.py) matches the reference.

GPUs of sm_90 run it. The interpreter runs it for 16 bits; here also for float32, on whose results
the tests can be strict.
"""

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted

from attention.cases import drawn, heads

pytest.importorskip("triton")

import fusedops
from fusedops.functional import attention
from fusedops.references.attention import attention_reference
from fusedops.triton.attention import call, forward

pytestmark = pytest.mark.skipif(not interpreted("triton"), reason="runs in the interpreter")

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3)},
    "past": {"window": (70, -1)},
    "future": {"window": (-1, 20)},
    "scale": {"causal": True, "scale": -0.3},
}


@pytest.fixture
def ahead(monkeypatch):
    """The calls that ran ahead."""
    found = []

    def runs_ahead(a):
        found.append(all(call.suits_descriptor(t) for t in (a.k, a.v)))
        return found[-1]

    monkeypatch.setattr(call, "runs_ahead", runs_ahead)
    return found


def run(q, k, v, **options):
    with fusedops.backend("triton"):
        return attention(q, k, v, return_lse=True, **options)


@grid(
    options=OPTIONS, shape=[(1, 4, 2, 130, 130, 24), (2, 2, 2, 70, 200, 16), (1, 2, 1, 150, 70, 40)]
)
def test_as_the_reference(options, shape, ahead):
    """Blocks with no whole tile, with some, and with tiles that need a mask on both sides."""
    q, k, v = heads(*shape, v_width=32)
    found = run(q, k, v, **OPTIONS[options])
    expected = attention_reference(q, k, v, **OPTIONS[options])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, check_dtype=False)
    assert ahead == [True]


@grid(options=["plain", "causal", "window"])
def test_sequences(options, ahead):
    """One has no queries, one no keys; NaN of other sequences and of the tail stay out."""
    cu_q = torch.tensor([0, 80, 80, 87, 160], dtype=torch.int32)
    cu_k = torch.tensor([0, 131, 140, 140, 213], dtype=torch.int32)
    q, k, v = (t[0].transpose(0, 1) for t in heads(1, 2, 1, 164, 215, 16))
    of = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    found = run(q, k, v, **of, **OPTIONS[options])
    expected = attention_reference(q, k, v, **of, **OPTIONS[options])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, check_dtype=False)
    k[131:140], v[131:140], k[213:], v[213:] = [torch.nan] * 4
    assert all(map(torch.equal, found, run(q, k, v, **of, **OPTIONS[options])))
    assert ahead == [True, True]


@pytest.mark.parametrize("together", [1, 3, 4, 100])
def test_each_block_of_each_head_runs_once(together, monkeypatch):
    """Whatever their order; the last group of heads may be smaller."""
    monkeypatch.setattr(forward, "heads_together", lambda a: together)
    q, k, v = heads(2, 2, 1, 130, 130, 16)
    out, lse = run(q, k, v, causal=True)
    expected = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-5, check_dtype=False)


def test_queries_before_the_first_key_see_nothing(ahead):
    """Their block has no tiles; the NaN of keys that nothing sees stay out."""
    q, k, v = heads(1, 2, 2, 200, 30, 16)
    k[:, :, 0], v[:, :, 0] = torch.nan, torch.nan
    out, lse = run(q, k, v, causal=True)
    assert not out[:, :, :64].count_nonzero() and (lse[:, :, :170] == -torch.inf).all()
    assert out[:, :, 171:].isnan().all()
    assert ahead == [True]


@pytest.mark.parametrize("t", ["k", "v"])
@pytest.mark.parametrize("strides", ["offset", "row", "none"])
def test_what_no_descriptor_describes(t, strides, ahead):
    """Its base or its rows are not multiples of 16 bytes: the other loop runs."""
    q, k, v = heads(1, 2, 2, 70, 80, 16)
    many = {"k": k, "v": v}
    if strides == "offset":
        many[t] = drawn(4, k.numel() + 1)[1:].view(k.shape)
    elif strides == "row":
        many[t] = drawn(4, 1, 2, 80, 17)[..., :16]
    else:
        many = {"k": k[:, :, :0], "v": v[:, :, :0]}
    out, _ = run(q, **many)
    expected = attention_reference(q, **many)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    assert ahead == [False]
