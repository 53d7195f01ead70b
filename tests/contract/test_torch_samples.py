"""fusedops' versions of torch functions match torch on its own test samples and further cases."""

import pytest
import torch
import torch.nn.functional as F
from axes import grid
from torch.testing._internal.common_methods_invocations import op_db

from fusedops import functional as ff
from fusedops.testing import gradients, yardstick

NAMES = "layer_norm", "rms_norm", "cross_entropy", "linear", "scaled_dot_product_attention"
OPERATORS = {
    op.name.removeprefix("nn.functional."): op
    for op in op_db
    if op.name.removeprefix("nn.functional.") in NAMES
}
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def samples(op, dtype):
    """(input, the other tensors and arguments, keywords); none where torch lacks the dtype."""
    if dtype in op.dtypes:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            yield (sample.input, *sample.args), sample.kwargs


def wide(value):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().double() if floating else value


@grid(dtype=DTYPES, name=NAMES)
def test_the_twin_gives_what_torch_gives(name, dtype):
    op, twin = OPERATORS[name], getattr(ff, name)
    cases = list(samples(op, dtype))
    assert len(cases) >= 6 or dtype != torch.float32
    for args, kwargs in cases:
        if kwargs.get("dropout_p"):  # torch draws another mask
            assert twin(*args, **kwargs).shape == op.op(*args, **kwargs).shape
            continue
        ours, eager = (gradients(f, args, **kwargs) for f in (twin, op.op))
        exact_kwargs = {key: wide(value) for key, value in kwargs.items()}
        exact = gradients(op.op, tuple(map(wide, args)), **exact_kwargs)
        assert ours.keys() == eager.keys()
        for key, value in ours.items():
            assert (value.shape, value.dtype) == (eager[key].shape, eager[key].dtype)
            if dtype.itemsize == 2:
                assert yardstick(value, eager[key], exact[key]) is None, (key, args, kwargs)
            else:
                assert near(value, eager[key]), (key, args, kwargs)


def near(value, eager):
    """The samples' scores are some hundreds, whose rounding is a probability's relative error."""
    if not value.numel():
        return True
    same = torch.equal(value.isnan(), eager.isnan())
    off = (value - eager).nan_to_num().abs().max()
    size = 1 + eager.nan_to_num().abs().max()
    return same and off <= 512 * torch.finfo(value.dtype).eps * size


def heads(count, length, batch=(2,)):
    return torch.randn(*batch, count, length, 8)


def agrees_with_torch(*args, **kwargs):
    """Output and gradients of scaled_dot_product_attention."""
    ours, torchs = (
        gradients(f, args, **kwargs)
        for f in (ff.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert ours.keys() == torchs.keys()
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


@grid(batch=[(), (2,), (3, 1, 2)], counts=[(8, 2, 4), (4, 4, 2), (4, 1, 4)])
def test_key_and_value_may_have_different_head_counts(counts, batch):
    q, k, v = (heads(n, length, batch) for n, length in zip(counts, (5, 7, 7), strict=True))
    agrees_with_torch(q, k, v, enable_gqa=True)
    agrees_with_torch(q, k, v, attn_mask=torch.randn(5, 7), enable_gqa=True)


@grid(
    "counts,wrong",
    [
        ((4, 3, 4), "key"),
        ((4, 4, 3), "value"),
        ((4, 2, 8), "value"),
        ((4, 0, 4), "key"),  # torch divides by 0 and the process ends
    ],
)
def test_head_counts_must_divide_those_of_query(counts, wrong):
    q, k, v = (heads(n, length) for n, length in zip(counts, (5, 7, 7), strict=True))
    count = counts[["query", "key", "value"].index(wrong)]
    message = (
        f"scaled_dot_product_attention: {wrong} must have a number of heads that divides "
        f"query's, 4, got {count}"
    )
    with pytest.raises(RuntimeError, match=message):
        ff.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def result_or_error(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)


@grid(needs_gradient=[False, True], kind=["bool", "float"])
def test_a_mask_beside_is_causal_does_what_torch_does(kind, needs_gradient):
    """torch adds both in its kernel for CPUs, and raises where its plain lines run."""
    q, k, v = (heads(4, n) for n in (5, 7, 7))
    mask = torch.randn(5, 7)
    mask = mask > 0 if kind == "bool" else mask.requires_grad_(needs_gradient)
    for args in ((q, k, v), (q[0], k[0], v[0])):
        ours, torchs = (
            result_or_error(f, *args, attn_mask=mask, is_causal=True)
            for f in (ff.scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        if isinstance(torchs, torch.Tensor):
            assert torch.equal(ours, torchs)
        else:
            assert ours == torchs


@grid(layout=[torch.jagged, torch.strided], nested=["key", "value", "key value", "query"])
def test_nested_beside_dense_tensors_does_what_torch_does(nested, layout):
    rows = [torch.randn(n, 2, 8) for n in (3, 1, 5)]
    sequences = torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)
    dense = torch.randn(3, 2, 5, 8)
    args = [sequences if name in nested.split() else dense for name in ("query", "key", "value")]
    ours, torchs = (
        result_or_error(f, *args)
        for f in (ff.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert ours == torchs
    assert isinstance(torchs, tuple)  # torch refuses them
