"""attention tests beyond those in tests/contract: dropout, memory, torch's arguments, errors."""

import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from axes import grid
from growth.peaks import peaks
from torch.utils.checkpoint import checkpoint

import fusedops
from attention.cases import FEATURES, drawn, heads, options
from fusedops.functional import attention, scaled_dot_product_attention
from fusedops.references.attention import attention_reference

F64 = torch.float64
SHAPE = (2, 4, 2, 6, 9, 8)


def arguments(names=(), dtype=torch.float32, shape=SHAPE):
    """q, k, v and the keywords, whose tensors have gradients where they may."""
    batch, q_heads, _, queries, keys, _ = shape
    qkv = [t.contiguous().requires_grad_() for t in heads(*shape, dtype=dtype)]
    kwargs = options(names, batch, q_heads, queries, keys)
    for name in ("bias", "sinks"):
        if name in kwargs and kwargs[name].is_floating_point():
            kwargs[name] = kwargs[name].to(dtype).requires_grad_()
    return qkv, kwargs


@pytest.mark.parametrize("queries", [2, 20])
def test_the_definition_is_the_kernel(queries):
    """Forward and first gradients, as where no kernel runs."""
    names = [n for n in FEATURES if n not in ("mask", "dropout")]
    qkv, kwargs = arguments(names, shape=(2, 4, 2, queries, 9, 8))
    leaves = [*qkv, kwargs["bias"], kwargs["sinks"]]

    def run(dtype):
        to = [t.detach().to(dtype).requires_grad_() for t in leaves]
        out, lse = attention(*to[:3], return_lse=True, **kwargs | {"bias": to[3], "sinks": to[4]})
        return out, lse, *torch.autograd.grad((out.sin().sum(), lse.sum()), to)

    for in_float32, in_float64 in zip(run(torch.float32), run(F64), strict=True):
        torch.testing.assert_close(in_float32, in_float64.float(), rtol=1e-4, atol=1e-5)


def test_the_operator_of_the_kernels_takes_float64():
    """Which has none: the definition runs."""
    q, k, v = (drawn(i, 1, 2, n, 8).double() for i, n in enumerate((5, 9, 9)))
    lengths, settings = (None, None, None, 5, 9), ([0.5, 0.0, 0.0], [-1, -1], True)
    actual = torch.ops.fusedops.attention_forward(q, k, v, None, None, *lengths, *settings)
    expected = attention_reference(q, k, v, scale=0.5)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_v_has_a_gradient_of_0_from_lse_alone(create_graph):
    qkv, _ = arguments()
    _, lse = attention(*qkv, return_lse=True)
    *_, dv = torch.autograd.grad(lse.sum(), qkv, create_graph=create_graph)
    assert torch.equal(dv, torch.zeros_like(dv))


def test_compile_with_dropout():
    qkv, kwargs = arguments(["dropout"])
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    assert compiled(*qkv, **kwargs).shape == qkv[0].shape  # Inductor draws the seed in its own way


def test_heads_of_key_and_value_that_do_not_divide_each_other():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 3, 7, 8)
    whole = q, k.repeat_interleave(3, 1), v.repeat_interleave(2, 1)
    expected = F.scaled_dot_product_attention(*whole)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)


def test_autocast_as_torchs():
    qkv, _ = arguments()
    with torch.autocast("cpu", torch.bfloat16):
        actual = attention(*qkv, bias=drawn(3, 6, 9))
        theirs = F.scaled_dot_product_attention(*qkv, attn_mask=drawn(3, 6, 9), enable_gqa=True)
    assert actual.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(actual, theirs, rtol=0.02, atol=0.02)


def test_dropout_follows_the_seed():
    qkv, _ = arguments(shape=(2, 4, 2, 30, 40, 8))

    def run(seed):
        torch.manual_seed(seed)
        return attention(*qkv, dropout_p=0.5)

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    share = attention(*(t.new_ones(t.shape) for t in qkv), dropout_p=0.25).mean()
    assert abs(share - 1) < 0.02
    torch.manual_seed(5)
    plain = torch.autograd.grad(attention(*qkv, dropout_p=0.5).sum(), qkv)
    torch.manual_seed(5)
    out = checkpoint(lambda *qkv: attention(*qkv, dropout_p=0.5), *qkv, use_reentrant=False)
    assert all(map(torch.equal, plain, torch.autograd.grad(out.sum(), qkv)))
    assert not attention(*qkv, dropout_p=1.0).count_nonzero()


GROWTH = """
from fusedops.functional import attention

for tokens in map(int, sys.argv[1:]):
    qkv = [torch.ones(1, 2, tokens, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    grow(lambda: attention(*qkv, causal=True).sum().backward())
"""


def test_memory_is_that_of_the_tokens():
    """No scores: twice the tokens take twice the memory, not four times. At 8192 tokens torch's own
    lines take 1.5 GiB. Medians of three calls: what else a process frees counts as well.
    """
    grown = peaks(GROWTH, "512", *["2048", "4096", "8192"] * 3)
    medians = [sorted(grown[i::3])[1] for i in range(3)]
    assert all(more <= 2.2 * less for less, more in pairwise(medians)), grown
    assert medians[-1] < 32 * 2**20


def test_errors_name_argument_wanted_and_got():
    q, k, v = (t.detach() for t in arguments()[0])
    wrong = {
        r"q must be \[batch, heads, queries, width\].*got float32 \[4, 6, 8\]": {"q": q[0]},
        r"v must be .* got float64": {"v": v.double()},
        r"k's heads must divide q's, 3, got 2": {"q": q[:, :3]},
        r"bias must be .* broadcast to the scores \[2, 4, 6, 9\], got float32 \[7, 9\]": {
            "bias": torch.zeros(7, 9)
        },
        r"sinks must be one number a head of q, \[4\], got float32 \[3\]": {
            "sinks": torch.zeros(3)
        },
    }
    for message, arguments_ in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            attention(**{"q": q, "k": k, "v": v} | arguments_)
    for message, kwargs in {
        "softcap must be above 0 and finite, got 0": {"softcap": 0.0},
        r"window must be \(left, right\).* got \[-2, 0\]": {"window": (-2, 0)},
        "dropout_p must be from 0 to 1, got 1.5": {"dropout_p": 1.5},
    }.items():
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, **kwargs)
    rows = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)
    with pytest.raises(RuntimeError, match="must come together and count the same"):
        cu_q = torch.tensor([0, 3, 6])
        attention(*rows, cu_seqlens_q=cu_q, cu_seqlens_k=torch.tensor([0, 9]))
    with pytest.raises(
        RuntimeError, match=r"must broadcast, got \[2, 4, 6, 8\], .* \(enable_gqa=True lets key"
    ):
        scaled_dot_product_attention(q, k, v)
    for no_bool in (1.5, 1, None):  # torch's takes none of them either
        with pytest.raises(TypeError, match="is_causal must be a bool"):
            scaled_dot_product_attention(q, q, q, is_causal=no_bool)
        with pytest.raises(TypeError, match="attention: causal must be a bool, got "):
            attention(q, k, v, causal=no_bool)


@grid(
    "starts,got",
    [
        ([1, 6], "1 at index 0"),
        ([-1, 6], "-1 at index 0"),
        ([0, 7], "7 at index 1 after 0"),
        ([0, 4, 3, 6], "3 at index 2 after 4"),
        ([2], "2 at index 0"),
    ],
    name=["cu_seqlens_q", "cu_seqlens_k"],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
)
def test_cu_seqlens_grow_from_0_to_the_tokens(starts, got, dtype, name):
    x = torch.randn(6, 2, 8, dtype=dtype)
    fine = torch.tensor([0] * (len(starts) - 1) + [0 if len(starts) == 1 else 6])
    lengths = {"cu_seqlens_q": fine, "cu_seqlens_k": fine} | {name: torch.tensor(starts)}
    message = f"attention: {name} must grow from 0 to at most 6, the number of tokens, got {got}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        attention(x, x, x, **lengths)


def test_a_kernel_is_what_runs():
    assert fusedops.env_report().count("\nattention ") == 1
    graph = attention(*arguments()[0]).grad_fn
    assert graph.name() == "FusedAttentionBackward"


def test_lengths_that_were_made_in_inference_mode():
    """They may be kept for the backward, as a collator's are."""
    with torch.inference_mode():
        lengths = torch.tensor([0, 3, 5])
    q, k, v = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(3))
    attention(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths).square().sum().backward()
    grads = [t.grad for t in (q, k, v)]
    lengths = torch.tensor([0, 3, 5])
    again = [t.detach().requires_grad_() for t in (q, k, v)]
    attention(*again, cu_seqlens_q=lengths, cu_seqlens_k=lengths).square().sum().backward()
    assert all(torch.equal(grad, t.grad) for grad, t in zip(grads, again, strict=True))
