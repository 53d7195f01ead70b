"""Results keep their bits under any default dtype and device of torch.

What runs under the default float32 must give the same bits under float64, bfloat16 and float16, and
where new tensors are made on the meta device.
"""

import ast
from itertools import cycle
from pathlib import Path

import pytest
import torch
from adamw.training import FORMATS, equal_states
from axes import grid
from children import forked

import fusedops
from contract.default_dtype_cases import (
    BF16,
    CALLS,
    DEFAULTS,
    F16,
    F32,
    F64,
    bound,
    default,
)
from contract.family import as_tuple
from fusedops.functional import quantize_weight
from fusedops.nn import attention as attention_module
from fusedops.optim import AdamW
from fusedops.references.quantized_linear import quantize_weight_reference
from fusedops.testing import backends, check, gradients

ROOT = Path(__file__).parents[2]
ON = pytest.mark.parametrize("name", DEFAULTS)


def assert_equal(actual, expected):
    """The same dtypes, devices and bits; NaN too."""
    assert actual.keys() == expected.keys()
    for key, t in actual.items():
        other = expected[key]
        assert (t.dtype, t.device, t.shape) == (other.dtype, other.device, other.shape), key
        assert torch.equal(_bytes(t), _bytes(other)), key


def _bytes(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


@grid(of=CALLS, dtype=[F32, BF16, F64], name=DEFAULTS)
def test_a_function_and_its_reference_keep_their_bits(of, dtype, name):
    call = bound(CALLS[of], dtype)
    for run in (call.function, call.reference):
        expected = gradients(run, call.args)
        with default(**DEFAULTS[name]):
            assert_equal(gradients(run, call.args), expected)


# The interpreter takes its time, so one default has to do. The CPU's bits are compared above. On
# simt the backward of quantized_linear is not a kernel's.
BY_BACKEND = [
    (of, backend)
    for of, call in CALLS.items()
    for backend in backends(call.operator)
    if backend not in ("cpu", "reference")
    and (call.operator, backend) != ("quantized_linear", "simt")
]


@pytest.mark.parametrize("of,backend", BY_BACKEND)
def test_every_other_backend_passes_the_yardstick(of, backend):
    call = bound(CALLS[of])
    with default(BF16):
        check(call.function, call.reference, call.args, backend, call.draws)


@grid(dtype=[F64, BF16, F16])
def test_a_module_of_no_dtype_has_the_default(dtype):
    with default(dtype):
        for kind in (fusedops.nn.Linear, fusedops.nn.QuantizedLinear):
            layer = kind(64, 8)
            assert layer.weight.dtype == layer.bias.dtype == dtype
            assert layer(torch.ones(2, 64)).dtype == dtype


@pytest.mark.parametrize("of,name", [*zip(CALLS, cycle(DEFAULTS), strict=False)])
def test_a_double_backward_keeps_its_bits(of, name):
    call = bound(CALLS[of])
    expected = _second_gradients(call)
    with default(**DEFAULTS[name]):
        assert_equal(_second_gradients(call), expected)


def _second_gradients(call):
    torch.manual_seed(0)
    inputs = [a.detach().requires_grad_() for a in call.args]
    outputs = as_tuple(call.function(*inputs))
    total = sum(o.square().sum() for o in outputs)
    first = torch.autograd.grad(total, inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    return {str(i): g for i, g in enumerate(second)}


SCALES = [("int8", None), ("int8 in groups", None), ("fp8", None)]
SCALES += [(format, scale) for format in ("int4", "nf4") for scale in ("absmax", "mse")]


@ON
@pytest.mark.parametrize("format,scale", SCALES)
def test_quantized_weights_keep_their_bytes(format, scale, name):
    weight = torch.randn(48, 128)
    group_size = {"int8 in groups": 32, "nf4": 64, "int4": 64}.get(format)
    format = format.split()[0]
    sizes = 128 if group_size is None else group_size, scale or "absmax"

    def quantized():
        given_group_size = group_size if format in ("int8", "int4") else None
        kernels = quantize_weight(
            weight, format, group_size=given_group_size, scale=scale
        ).tensors()
        reference = quantize_weight_reference(weight, format, *sizes)
        parts = {f"reference {i}": t for i, t in enumerate(reference) if t is not None}
        return kernels | parts

    expected = quantized()
    with default(**DEFAULTS[name]):
        assert_equal(quantized(), expected)


SHAPES = [(5000,), (33, 7), (4096,), (16, 512), ()]
OPTIONS = [{}, {"amsgrad": True}, {"max_grad_norm": 0.5}, {"lr": torch.tensor(1e-3)}]
STEPS = [(dtype, options) for dtype in (F32, F16, BF16) for options in OPTIONS]
STEPS.append((BF16, {"master_weights": "remainder"}))


BACKENDS = [name for name in backends("adamw_step") if name != "cuda"]


@grid("dtype,options", STEPS, state_dtype=FORMATS, backend=BACKENDS, name=DEFAULTS)
def test_steps_of_adamw_keep_their_bits(backend, state_dtype, dtype, options, name):
    draw = torch.Generator().manual_seed(0)
    rows = [[torch.randn(s, generator=draw).to(dtype) for s in SHAPES] for _ in range(4)]

    def trained():
        params = [t.clone().requires_grad_() for t in rows[0]]
        optimizer = AdamW(params, state_dtype=state_dtype, **options)
        for row in rows[1:]:
            for p, grad in zip(params, row, strict=True):
                p.grad = grad.clone()
            optimizer.step()
        later = AdamW(params, state_dtype=state_dtype, **options)
        later.load_state_dict(optimizer.torch_state_dict())
        return optimizer, later

    with fusedops.backend(backend):
        expected = trained()
        with default(**DEFAULTS[name]):
            for stepped, other in zip(trained(), expected, strict=True):
                equal_states(stepped, other)


@ON
def test_what_torch_has_stepped_goes_on_in_the_kernels(name):
    """Under a default of float64 torch counts steps in it."""
    with default(**DEFAULTS[name] | {"device": None}):
        p = torch.ones(5000, dtype=F32).requires_grad_()
        p.grad = torch.ones_like(p)
        optimizer = AdamW([p], differentiable=True)
        p.requires_grad_(False)
        optimizer.step()
        p.requires_grad_()
        optimizer.param_groups[0]["differentiable"] = False
        optimizer.step()
    assert optimizer.state[p]["step"].dtype == F32 and optimizer.state[p]["step"] == 2


@ON
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_clipping_keeps_its_bits(dtype, name):
    grads = [torch.randn(s, device="cpu").to(dtype) for s in SHAPES]

    def clipped():
        params = [torch.empty_like(grad).requires_grad_() for grad in grads]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        norm = fusedops.clip_grad_norm_(params, 0.5)
        return {"norm": norm} | {str(i): p.grad for i, p in enumerate(params)}

    expected = clipped()
    with default(**DEFAULTS[name]):
        assert_equal(clipped(), expected)


@pytest.fixture(scope="module")
def patched_steps(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("steps")
    forked("-m", "children.patched_defaults", folder, large=True).printed()
    return {path.stem: torch.load(path, weights_only=False) for path in folder.iterdir()}


@ON
def test_a_patched_training_step_keeps_its_sites_and_bits(name, patched_steps):
    expected = patched_steps["float32"]
    assert len(expected) == 6
    for of, (sites, tensors) in patched_steps[name].items():
        assert {kind for _, kind in sites} >= {"attention", "norm", "residual"}
        assert sites == expected[of][0]
        assert_equal(tensors, expected[of][1])


def test_an_import_under_a_default_device():
    code = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.bfloat16)
import fusedops
x = torch.arange(32, device="cpu").view(4, 8).float().requires_grad_()
weight = torch.ones(8, dtype=torch.float32, device="cpu", requires_grad=True)
fusedops.functional.rms_norm(x, (8,), weight).square().sum().backward()
optimizer = fusedops.optim.AdamW8bit([x, weight], min_8bit_size=0)
optimizer.step()
state = optimizer.state[x]
assert x.isfinite().all() and x.grad.device.type == "cpu"
assert {t.device.type for t in state.values()} == {"cpu"}, state
assert state["step"].dtype == state["exp_avg_scale"].dtype == torch.float32
"""
    forked("-c", code).printed(timeout=120)


def test_attention_keeps_its_kernel_under_a_default_device(recorded):
    calls = recorded(attention_module, "scaled_dot_product_attention")
    module, x = fusedops.nn.MultiheadAttention(24, 4, batch_first=True), torch.randn(2, 5, 24)
    with default(device="cpu"):
        module(x, x, x, need_weights=False)
    assert len(calls) == 1


def test_quantize_weight_keeps_its_kernel_under_a_default_device(monkeypatch):
    monkeypatch.setitem(quantize_weight.__globals__, "quantize_groups_reference", None)
    with default(device="cpu"):
        quantize_weight(torch.ones(4, 64, dtype=F32), "int8")


# Functions of torch that create a tensor from nothing; those of the second line hold ints.
CREATE = {"as_tensor", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randn"}
CREATE |= {"scalar_tensor", "tensor", "zeros", "logspace", "asarray", "empty_strided"}
INTS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
OWN_PROGRAMS = ("demo",)  # `python -m fusedops ...`, where torch's defaults are ours


def test_every_new_tensor_says_its_dtype_and_device():
    package = Path(fusedops.__file__).parent
    paths = [
        p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in OWN_PROGRAMS
    ]
    assert len(paths) > 100
    assert not [call for path in paths for call in calls_of_default_dtype(path)]


def calls_of_default_dtype(path):
    """The calls that leave a new tensor's dtype or device to the default."""
    tree = ast.parse(path.read_text())
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).removeprefix("torch.")
        if ast.unparse(call.func) != f"torch.{name}" or name not in CREATE | INTS:
            continue
        said = {keyword.arg for keyword in call.keywords}
        required = {"device"} if name in INTS else {"device", "dtype"}
        if not required <= said:
            yield f"{path}:{call.lineno}: {ast.unparse(call)}"
