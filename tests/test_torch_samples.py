"""torch's own samples of its operators, given to their twins."""

import pytest
import torch
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_twin_gives_what_torch_gives(name, dtype):
    op, twin = OPERATORS[name], getattr(ff, name)
    for args, kwargs in samples(op, dtype):
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


@pytest.mark.parametrize("name", NAMES)
def test_there_are_samples(name):
    assert len(list(samples(OPERATORS[name], torch.float32))) >= 6
