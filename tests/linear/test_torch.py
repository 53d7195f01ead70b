"""linear and its module in autograd, autocast, torch.compile and export, compared with torch's."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from axes import grid
from torch import nn

import fusedops
from fusedops.functional import linear
from fusedops.references.linear import linear_reference
from fusedops.testing import device_of, gradients, placed
from linear.cases import BACKENDS, CASES, KINDS, inputs

FORCED = pytest.mark.parametrize("backend", BACKENDS)


@FORCED
def test_a_gradient_of_a_gradient_of_one_leaf(backend):
    """z's own gradient comes back to the node, which has none of y then."""
    x, weight, bias = placed(inputs((4, 8), 6, torch.float32), device_of(backend))
    x.requires_grad_()

    def second(run):
        (dx,) = torch.autograd.grad(run(x, weight, bias, "gelu").sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)[0]

    with fusedops.backend(backend):
        torch.testing.assert_close(second(linear), second(linear_reference))


@grid("kind,backend", CASES, rows=[10, 300])
def test_gradients_lie_as_their_weight(kind, backend, rows):
    """So that autograd need not copy them to add them to those of Conv1D's."""
    x, weight, bias = placed(inputs((rows, 90), 110, torch.float32), device_of(backend))
    grads = []
    for w in (weight, weight.t().contiguous().t()):
        leaves = x.requires_grad_(), w.requires_grad_()
        with fusedops.backend(backend):
            grads.append(torch.autograd.grad(linear(*leaves, bias, kind).cos().sum(), leaves))
        assert grads[-1][1].stride() == w.stride()
    for row_major, column_major in zip(*grads, strict=True):
        torch.testing.assert_close(column_major.contiguous(), row_major)


def test_compile_by_default():
    torch.compiler.reset()
    compiled = torch.compile(linear, fullgraph=True)
    for rows in (2, 300):
        args = inputs((rows, 130), 140, torch.float32)
        actual, expected = gradients(compiled, (*args, "gelu")), gradients(linear, (*args, "gelu"))
        torch.testing.assert_close(actual, expected)


@grid(FORCED, dtype=[torch.float32, torch.bfloat16, torch.float64], kind=[None, "gelu"])
def test_autocast_as_torch(backend, dtype, kind):
    device = device_of(backend)
    x, weight, bias = placed(inputs((40, 16), 24, dtype), device)
    weight, bias = weight.float(), bias.float()
    leaves = [a.requires_grad_() for a in (x, weight, bias)]
    if dtype == torch.float64:  # F.linear's own error: autocast leaves float64 alone
        weight, bias = (t.detach().double().requires_grad_() for t in (weight, bias))
        leaves = [x, weight, bias]
    with torch.autocast(device.type, torch.bfloat16), fusedops.backend(backend):
        ours, theirs = linear(*leaves, kind), linear_reference(*leaves, kind)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (ours, theirs)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_cuda_autocast_casts_on_its_own_key():
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    x, weight, bias = inputs((4, 16), 8, torch.float16)
    with torch.autocast("cuda", torch.float16):
        actual = torch.ops.fusedops.linear.default.redispatch(key, x, weight, bias, "relu")
    torch.testing.assert_close(actual, linear_reference(x, weight, bias, "relu"))


@pytest.mark.parametrize("trained", ["input", "weight"])
def test_keeps_what_torch_keeps(trained):
    """A frozen weight (LoRA) keeps no input, and an input without gradient no weight."""
    x, weight, bias = inputs((40, 16), 24, torch.float32)
    (x if trained == "input" else weight).requires_grad_()
    kept = []

    def keep(t):
        kept.append(t.data_ptr())
        return t

    with fusedops.backend("cpu"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        linear(x, weight, bias, "gelu")
    unneeded = x if trained == "input" else weight
    assert len(kept) == 2 and unneeded.data_ptr() not in kept


class Token:
    """Something to hold a weak reference to."""


@pytest.mark.parametrize("kind", [None, "gelu"])
def test_the_node_goes_with_its_output(kind):
    """z, which the node keeps, must not keep the node."""
    x, weight, bias = inputs((40, 16), 24, torch.float32)
    with fusedops.backend("cpu"):
        y = linear(x, weight.requires_grad_(), bias, kind)
    token = Token()
    y.grad_fn.metadata["token"] = token
    alive = weakref.ref(token)
    del token
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


OTHERS = {
    "float64": lambda: inputs((4, 8), 3, torch.float64),
    "complex": lambda: tuple(t.to(torch.complex64) for t in inputs((4, 8), 3, torch.float32)),
    "integers": lambda: (torch.arange(6).view(2, 3), torch.ones(4, 3, dtype=torch.int64), None),
    "a weight without rows": lambda: (torch.randn(4, 8), torch.randn(8), None),
    "sparse weight": lambda: (torch.randn(4, 8), torch.eye(8).to_sparse_csr(), None),
    "meta": lambda: tuple(t.to("meta") for t in inputs((4, 8), 3, torch.float32)),
    "a bias of one element": lambda: (torch.randn(4, 8), torch.randn(3, 8), torch.randn(1)),
}


@pytest.mark.parametrize("why", OTHERS)
def test_what_has_no_kernel_is_torchs(why):
    args = OTHERS[why]()
    with fusedops.backend("cpu"):
        actual = linear(*args)
    expected = F.linear(*args)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.is_meta or torch.equal(actual, expected)


@grid(bias=[True, False], dtype=[torch.float32, torch.bfloat16])
def test_module_twin(bias, dtype):
    torch.manual_seed(3)
    ours = fusedops.nn.Linear(12, 20, bias, dtype=dtype)
    torch.manual_seed(3)
    theirs = nn.Linear(12, 20, bias, dtype=dtype)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, 12, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)


def test_module_activates_and_says_so():
    module = fusedops.nn.Linear(12, 20, activation="gelu")
    x = torch.randn(3, 12)
    torch.testing.assert_close(module(x), F.gelu(F.linear(x, module.weight, module.bias)))
    assert repr(module) == "Linear(in_features=12, out_features=20, bias=True, activation='gelu')"
    assert copy.deepcopy(module)(x).equal(module(x))


def test_a_module_refuses_another_activation():
    with pytest.raises(ValueError, match=r"activation must be one of None, 'relu', .* got 'tanh'"):
        fusedops.nn.Linear(3, 4, activation="tanh")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@grid(kind=KINDS, gradients_on=[True, False])
def test_jit_trace(kind, gradients_on):
    """Its check records the call a second time without gradients: the operator is the same."""
    module, x = fusedops.nn.Linear(32, 16, activation=kind), torch.randn(4, 32)
    with torch.set_grad_enabled(gradients_on):
        traced = torch.jit.trace(module, (x,))
    torch.testing.assert_close(traced(x), module(x))
    assert "fusedops::linear" in {node.kind() for node in traced.inlined_graph.nodes()}
