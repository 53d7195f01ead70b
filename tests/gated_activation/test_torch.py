"""swiglu and geglu in PyTorch: autograd, functorch, compile, export, modules."""

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.functional import geglu, swiglu
from gated_activation.cases import GPT_OSS, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("up_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_as_torch(dtype, up_dtype, device):
    gate, up = inputs((4, 16), dtype, up_dtype=up_dtype)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.float16):
        for ours, theirs in (
            (swiglu(gate, up), F.silu(gate) * up),
            (geglu(gate, up), F.gelu(gate) * up),
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_gradients_have_the_dtypes_of_their_tensors():
    gate, up = (t.requires_grad_() for t in inputs((4, 16), torch.bfloat16, up_dtype=torch.float32))
    y = swiglu(gate, up)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert (y.dtype, dgate.dtype, dup.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def float32(*shape, **to):
    return torch.zeros(*shape, **to)


ERRORS = {
    r"swiglu: gate must be float32, .*got int64 \[4, 8\]": lambda: swiglu(
        float32(4, 8, dtype=torch.int64)
    ),
    r"geglu: up must be float32, .*got int32 \[4\]": lambda: geglu(
        float32(4), float32(4, dtype=torch.int32)
    ),
    r"swiglu: up must have shape \[4, 8\] like gate, got float32 \[4, 9\]": lambda: swiglu(
        float32(4, 8), float32(4, 9)
    ),
    r"geglu: up must have shape \[4, 8\] like gate, got float16 \[8\]": lambda: geglu(
        float32(4, 8), float32(8, dtype=torch.float16)
    ),
    r"swiglu: up must be on cpu like gate, got meta": lambda: swiglu(
        float32(4), float32(4, device="meta")
    ),
    r"swiglu: without up, gate must be packed, .*even size, got float32 \[4, 7\]": lambda: swiglu(
        float32(4, 7)
    ),
    r"geglu: without up, gate must be packed, .*got float32 \[\]": lambda: geglu(float32(())),
    r"geglu: approximate must be 'none' or 'tanh', got 'erf'": lambda: geglu(
        float32(4), approximate="erf"
    ),
    r"swiglu: limit must be at least 0, got -1": lambda: swiglu(float32(4), limit=-1.0),
    r"swiglu: limit must be at least 0, got -?nan": lambda: swiglu(float32(4), limit=torch.nan),
    r"dy must have shape \[4, 8\] like y, got float32 \[4\]": lambda: (
        torch.ops.fusedops.gated_activation_backward(
            float32(4), float32(4, 16), None, "geglu", None, 1.0, 0.0, [True, True]
        )
    ),
    r"gated_activation: up must be Float like gate, got float16 \[4\]": lambda: (
        torch.ops.fusedops.gated_activation_forward(
            float32(4), float32(4, dtype=torch.float16), "geglu", None, 1.0, 0.0
        )
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_operator_argument_wanted_and_got(message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        ERRORS[message]()


def test_meta_tensors():
    gate = torch.zeros(2, 3, 8, device="meta", dtype=torch.bfloat16)
    assert swiglu(gate).shape == (2, 3, 4) and swiglu(gate).dtype == torch.bfloat16
    y = geglu(gate, gate.float())
    assert y.shape == gate.shape and y.dtype == torch.float32 and y.is_meta


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
