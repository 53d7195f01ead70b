"""swiglu and geglu under autocast, and as modules."""

import pytest
import torch
import torch.nn.functional as F
from axes import grid

import fusedops
from fusedops.functional import geglu, swiglu
from gated_activation.cases import GPT_OSS, inputs


@grid(
    dtype=[torch.float32, torch.bfloat16],
    up_dtype=[torch.float32, torch.bfloat16],
    device=["cpu", "cuda"],
)
def test_autocast_as_torch(dtype, up_dtype, device):
    gate, up = inputs((4, 16), dtype, up_dtype=up_dtype)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.float16):
        for ours, theirs in (
            (swiglu(gate, up), F.silu(gate) * up),
            (geglu(gate, up), F.gelu(gate) * up),
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_modules_are_their_functions(packed):
    args = inputs((3, 8), torch.bfloat16, packed)
    modules = fusedops.nn.SwiGLU(**GPT_OSS), fusedops.nn.GEGLU("tanh")
    assert torch.equal(modules[0](*args), swiglu(*args, **GPT_OSS))
    assert torch.equal(modules[1](*args), geglu(*args, approximate="tanh"))
    assert torch.equal(fusedops.nn.SwiGLU()(*args), swiglu(*args))
    assert torch.equal(fusedops.nn.GEGLU()(*args), geglu(*args))
    assert "limit=1.25, alpha=1.702, up_offset=1.0" in repr(modules[0])
    assert repr(modules[1]) == "GEGLU(approximate='tanh')"
    assert not any(module.state_dict() for module in modules)
