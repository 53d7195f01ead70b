"""fusedops.nn.MultiheadAttention behaves like torch.nn.MultiheadAttention."""

import copy

import pytest
import torch
from axes import grid
from torch import nn

import fusedops
from fusedops.nn import attention

EMBED, HEADS, BATCH, LENGTH, SOURCE = 24, 4, 3, 5, 7
OPTIONS = {
    "plain": {},
    "bare": {"bias": False},
    "batch_first": {"batch_first": True},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 10, "vdim": 14},
}
# What padding and mask are. torch warns of two kinds at once.
PAIRS = [
    (None, None),
    ("bool", None),
    (None, "bool"),
    ("bool", "bool"),
    ("float", None),
    (None, "float"),
]
PAIRS += [("float", "float")]


@pytest.fixture
def calls(recorded):
    """Records the positional arguments of the fused function's calls."""
    return recorded(attention, "scaled_dot_product_attention", lambda *args, **_: args)


def twins(dtype=torch.float64, **options):
    """Returns our module and torch's, with equal parameters."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options).to(dtype)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    ours = fusedops.nn.MultiheadAttention(EMBED, HEADS, **options).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(module, dtype=torch.float64, length=LENGTH, source=SOURCE):
    draw = torch.Generator().manual_seed(1)
    shapes = (length, EMBED), (source, module.kdim), (source, module.vdim)
    tensors = [torch.randn(BATCH, *shape, generator=draw, dtype=dtype) for shape in shapes]
    return tensors if module.batch_first else [t.transpose(0, 1).contiguous() for t in tensors]


def same(ours, theirs, args, **kwargs):
    """Asserts equal outputs, and equal gradients of inputs and parameters."""
    results = []
    for module in (ours, theirs):
        leaves = [a.detach().clone().requires_grad_() for a in args]
        more = {k: v for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.requires_grad}
        out, weights = module(*leaves, need_weights=False, **kwargs)
        assert weights is None
        sources = [*leaves, *module.parameters(), *more.values()]
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad(out, sources, cotangent, allow_unused=True)])
    for ours_t, theirs_t in zip(*results, strict=True):
        assert (ours_t is None) == (theirs_t is None)
        if ours_t is not None:
            torch.testing.assert_close(ours_t, theirs_t, rtol=1e-10, atol=1e-10)
    return results[0][0]


def padding(kind, source=SOURCE):
    hidden = torch.zeros(BATCH, source, dtype=torch.bool)
    hidden[0, -2:] = hidden[1, :3] = True
    if kind == "bool":
        return hidden
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf) + 0.5


def masks(kind, shape=(LENGTH, SOURCE)):
    draw = torch.Generator().manual_seed(2)
    if kind == "bool":
        hidden = torch.rand(*shape, generator=draw) < 0.4
        hidden[..., 3:5] = False
        return hidden
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


@grid("pad,mask", PAIRS, name=OPTIONS)
def test_masks(name, pad, mask, calls):
    """A float mask has a gradient."""
    ours, theirs = twins(**OPTIONS[name])
    pad, mask = pad and padding(pad), mask and masks(mask)
    if mask is not None and mask.is_floating_point():
        mask.requires_grad_()
    same(ours, theirs, inputs(ours), key_padding_mask=pad, attn_mask=mask)
    assert len(calls) == 1


def test_two_kinds_of_mask_are_added(calls):
    ours, theirs = twins()
    with pytest.warns(UserWarning, match="mismatched"):
        want, _ = theirs(*inputs(ours), padding("bool"), False, masks("float"))
    got, _ = ours(*inputs(ours), padding("bool"), False, masks("float"))
    torch.testing.assert_close(got, want)
    assert len(calls) == 1


@grid(kind=["bool", "float"], name=["plain", "both"])
def test_a_mask_for_each_head(kind, name):
    ours, theirs = twins(**OPTIONS[name])
    mask = masks(kind, (BATCH * HEADS, LENGTH, SOURCE))
    same(ours, theirs, inputs(ours), attn_mask=mask)
    same(ours, theirs, inputs(ours), attn_mask=mask, key_padding_mask=padding(kind))


@grid(name=["plain", "batch_first", "bias_kv"], padded=[False, True])
def test_causal(name, padded, calls):
    """is_causal replaces the mask, unless there is also a padding mask."""
    ours, theirs = twins(**OPTIONS[name])
    mask = nn.Transformer.generate_square_subsequent_mask(SOURCE, dtype=torch.float64)
    kwargs = {"attn_mask": mask, "is_causal": True}
    pad = padding("float")
    pad[1, :3] = 0.5  # the first query sees a key
    kwargs |= {"key_padding_mask": pad} if padded else {}
    same(ours, theirs, inputs(ours, length=SOURCE), **kwargs)
    assert len(calls) == 1


def test_causal_without_a_mask_is_torchs_error(calls):
    ours, _ = twins()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        ours(*inputs(ours), need_weights=False, is_causal=True)
    assert not calls


@pytest.mark.parametrize("name", ["plain", "batch_first", "both"])
def test_unbatched(name, calls):
    ours, theirs = twins(**OPTIONS[name])
    args = [t[0] if ours.batch_first else t[:, 0] for t in inputs(ours)]
    out = same(ours, theirs, args)
    assert out.shape == (LENGTH, EMBED)
    kwargs = {"key_padding_mask": padding("bool")[0], "attn_mask": masks("bool")}
    same(ours, theirs, args, **kwargs)
    same(ours, theirs, args, attn_mask=masks("float", (HEADS, LENGTH, SOURCE)))
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["plain", "batch_first"])
def test_self_attention_is_one_product(name, calls):
    ours, theirs = twins(**OPTIONS[name])
    x = inputs(ours, length=SOURCE)[0]
    got, want = (m(x, x, x, need_weights=False)[0] for m in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    q, _, v = calls[0][:3]
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    with torch.no_grad():  # torch's fast path
        torch.testing.assert_close(ours.eval()(x, x, x, need_weights=False)[0], want)


def test_weights_are_torchs(calls):
    ours, theirs = twins()
    for average in (True, False):
        kwargs = {"key_padding_mask": padding("bool"), "average_attn_weights": average}
        got, want = ours(*inputs(ours), **kwargs), theirs(*inputs(ours), **kwargs)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert not calls


def test_a_query_that_sees_no_key_gives_the_bias_of_the_output():
    ours, _ = twins()
    hidden = torch.ones(BATCH, SOURCE, dtype=torch.bool)
    out, _ = ours(*inputs(ours), key_padding_mask=hidden, need_weights=False)
    assert torch.equal(out, ours.out_proj.bias.expand_as(out))


def test_nested_tensors_are_torchs(calls):
    ours, theirs = (m.eval() for m in twins(torch.float32, batch_first=True))
    rows = [torch.randn(n, EMBED) for n in (3, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.strided)
    with torch.no_grad():
        got, want = (m(x, x, x, need_weights=False)[0] for m in (ours, theirs))
    assert all(torch.equal(g, w) for g, w in zip(got.unbind(), want.unbind(), strict=True))
    assert not calls


def test_dropout_in_training_only(calls):
    ours, _ = twins(dropout=0.5)
    args = inputs(ours)
    torch.manual_seed(3)
    dropped = ours(*args, need_weights=False)[0]
    torch.manual_seed(3)
    assert torch.equal(ours(*args, need_weights=False)[0], dropped)
    assert not torch.equal(ours(*args, need_weights=False)[0], dropped)
    ours.eval()
    assert torch.equal(*(ours(*args, need_weights=False)[0] for _ in range(2)))
    assert [args[4] for args in calls] == [0.5] * 3 + [0.0] * 2


def test_state_dict_and_names_are_torchs():
    for options in OPTIONS.values():
        ours, theirs = twins(**options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert isinstance(ours, nn.MultiheadAttention)
        theirs.load_state_dict(copy.deepcopy(ours).state_dict())


@pytest.mark.parametrize("name", ["plain", "both"])
def test_compiles(name):
    ours, _ = twins(torch.float32, **OPTIONS[name])
    args = inputs(ours, torch.float32)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    kwargs = {"need_weights": False, "key_padding_mask": padding("bool")}
    torch.testing.assert_close(compiled(*args, **kwargs)[0], ours(*args, **kwargs)[0])


def test_autocast():
    ours, theirs = twins(torch.float32)
    args = inputs(ours, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (
            m(*args, need_weights=False, attn_mask=masks("float").float())[0]
            for m in (ours, theirs)
        )
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
