"""The norm functions in vmap, torch.compile and autocast; complex, nested and meta tensors."""

import pytest
import torch
from axes import grid
from contract.interpreter import rounds_right
from torch import nn

import fusedops
from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fusedops.references import norm
from fusedops.testing import device_of
from norm.cases import BACKENDS, FUNCTIONS, inputs


def test_h_needs_no_gradient_when_only_the_weight_does():
    x = torch.randn(4, 8)
    y, h = add_rms_norm(x, x, torch.ones(8, requires_grad=True))
    assert y.requires_grad and not h.requires_grad


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_vmap_sees_through_the_operator_and_asks_for_randomness():
    x = torch.ones(3, 4, 8)

    def h_of(t):
        return add_rms_norm(t, t * 0, dropout_p=0.5)[1]

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(h_of)(x)
    same = torch.vmap(h_of, randomness="same")(x)
    assert torch.equal(same[0], same[1]) and (same == 0).any()
    torch.testing.assert_close(torch.vmap(lambda t: layer_norm(t, (8,)))(x), layer_norm(x, (8,)))


def test_complex_inputs_go_to_torch():
    z = torch.randn(3, 8, dtype=torch.complex64)
    assert torch.equal(rms_norm(z, (8,)), nn.functional.rms_norm(z, (8,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "composite"])
def test_compile_with_dropout_runs_the_same_mask_in_backward(dtype):
    compiled = torch.compile(lambda x, r: add_layer_norm(x, r, dropout_p=0.5)[1], fullgraph=True)
    x = torch.randn(20, 64, dtype=dtype, requires_grad=True)
    h = compiled(x, torch.zeros_like(x))
    (dx,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(dx != 0, h != 0)


def test_float64_equals_torchs_layer_norm_bit_for_bit():
    inputs = [t.double().requires_grad_() for t in torch.randn(3, 4, 50)]
    x, weight, bias = inputs[0], inputs[1][0], inputs[2][0]
    results = []
    for norm_of in (layer_norm, nn.functional.layer_norm):
        y = norm_of(x, (50,), weight, bias)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_dropout_mask_is_the_reference_and_opaque_to_the_compiler():
    torch.manual_seed(5)
    expected = norm.dropout_reference(torch.ones(20, 65), 0.5) != 0
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, ())
    mask = torch.ops.fusedops.dropout_mask
    assert torch.equal(mask(seed, 20, 65, 0.5), expected)
    assert torch.equal(torch.compile(mask, fullgraph=True)(seed, 20, 65, 0.5), expected)
    torch.library.opcheck(mask, (seed, 20, 65, 0.5))


@grid(
    backend=[name for name in BACKENDS if rounds_right(name, to=torch.bfloat16)],
    dtype=[torch.float32, torch.bfloat16],
)
def test_autocast_as_torch(backend, dtype):
    device = device_of(backend)
    x, w = torch.randn(4, 16, dtype=dtype, device=device), torch.randn(16, device=device)
    with torch.autocast(device.type, torch.bfloat16), fusedops.backend(backend):
        for ours, theirs in (
            (layer_norm(x, (16,), w, w), nn.functional.layer_norm(x, (16,), w, w)),
            (rms_norm(x, (16,), w), nn.functional.rms_norm(x, (16,), w)),
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs)


@grid(op=FUNCTIONS, residual_dtype=[torch.float32, torch.bfloat16])
def test_cuda_autocast_runs_norms_in_float32(op, residual_dtype):
    # the kernel of the AutocastCUDA key, which needs no GPU
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    args = inputs(op, (4, 33), torch.bfloat16, torch.float32, residual_dtype)
    rounding = {"rounding": "torch"} if "rms" in op else {}
    normed = getattr(torch.ops.fusedops, op).default.redispatch(key, *args, **rounding)
    if "add" in op:
        normed, h = normed
        assert torch.equal(h, args[0] + args[1])
        args = (h, (33,), *args[2:])
    norm_of_h = nn.functional.layer_norm if "layer" in op else nn.functional.rms_norm
    torch.testing.assert_close(normed, norm_of_h(args[0].float(), *args[1:]))
