"""Shared helpers for gated-activation tests: functions, arguments, backends."""

import pytest
import torch

from fusedops.functional import geglu, swiglu
from fusedops.references import gated_activation
from fusedops.testing import backends, check

PACKED = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
GPT_OSS = {"limit": 1.25, "alpha": 1.702, "up_offset": 1.0}  # a limit that many elements pass
# Name: function, reference, keywords.
KINDS = {
    "swiglu": (swiglu, gated_activation.swiglu_reference, {}),
    "swiglu limited": (swiglu, gated_activation.swiglu_reference, GPT_OSS),
    "geglu": (geglu, gated_activation.geglu_reference, {}),
    "geglu tanh": (geglu, gated_activation.geglu_reference, {"approximate": "tanh"}),
}
BACKENDS = [name for name in backends("swiglu") if name != "reference"]
CASES = [(kind, name) for kind in KINDS for name in BACKENDS]


def inputs(shape, dtype, packed=False, up_dtype=None):
    """Returns gate and up of `shape`, or both in one tensor."""
    draw = torch.Generator().manual_seed(12)
    gate, up = (torch.randn(shape, generator=draw) * 2 + 0.25 for _ in range(2))
    if packed:
        return (torch.cat([gate, up], -1).to(dtype),)
    return gate.to(dtype), up.to(up_dtype or dtype)


def compare(kind, backend, args):
    function, reference, kwargs = KINDS[kind]
    check(function, reference, args, backend, **kwargs)
