"""Tests that test_uncompiled.py runs in a process without the compiled library."""

import copy
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from axes import grid
from contract.family import BF16, F32, F64, FAMILIES, as_tuple, moved, over
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops import backends, extension, functional, optim
from fusedops.backends import unavailable
from fusedops.testing import gradients, yardstick

pytestmark = pytest.mark.filterwarnings("ignore:fusedops has no compiled part")

# A function hides this module in fusedops.functional.
quantized_linear = importlib.import_module("fusedops.functional.quantized_linear")
references = importlib.import_module("fusedops.references.quantized_linear")


def test_this_process_has_no_compiled_part():
    assert extension.UNCOMPILED and not extension.BUILD


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantized(format):
    weight = functional.quantize_weight(drawn(24, 64), format)
    return *quantized_linear._operands(weight), *quantized_linear._layout(weight)


CALLS = {
    f"{family} {name}": call
    for family, record in FAMILIES.items()
    for name, call in (record.calls | record.more).items()
}
DRAWS = {family: min(record.draws, 2) for family, record in FAMILIES.items()}


@grid(dtype=[F32, BF16, F64], name=CALLS)
def test_forward_and_gradients_against_float64(name, dtype):
    function, reference, leaves = CALLS[name].both(CALLS[name].args(6, dtype=dtype))
    inputs = moved(leaves, DRAWS[name.split()[0]])
    actual, eager = (over(run, inputs, dtype) for run in (function, reference))
    exact = over(reference, inputs, F64)
    assert actual.keys() == exact.keys()
    if dtype == F64:
        torch.testing.assert_close(actual, exact)
        return
    complaints = {key: yardstick(actual[key], eager[key], exact[key]) for key in actual}
    assert not any(complaints.values()), complaints


# Of each operator with kernels in Triton.
TRITON = [f"norm {op}" for op in backends.FAMILIES["norm"]]
TRITON += ["norm add_rms_norm with dropout", "attention dropout", "attention all"]
TRITON += ["attention sequences", "cross_entropy cross_entropy all of none"]
TRITON += ["cross_entropy linear_cross_entropy all", "cross_entropy linear_log_probs all"]
TRITON += [f"quantized_linear {format}" for format in ("int8", "int4", "nf4", "fp8")]


@pytest.mark.skipif(unavailable("attention", "triton") is not None, reason="needs Triton")
@pytest.mark.parametrize("name", TRITON)
def test_tritons_kernels_with_gradients(name):
    """On a GPU by default; here interpreted."""
    function, reference, leaves = CALLS[name].both(CALLS[name].args(6, backend="triton"))
    with fusedops.backend("triton"):
        actual = gradients(function, leaves)
        with kernels_counted() as calls:
            function(leaves[0].detach().requires_grad_(), *leaves[1:])
        assert calls
    torch.testing.assert_close(actual, gradients(reference, leaves), rtol=1e-4, atol=1e-5)


class kernels_counted(TorchDispatchMode):
    """Counts the calls of kernel operators."""

    def __enter__(self):
        super().__enter__()
        self.calls = []
        return self.calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedops" and "forward" in function.name():
            self.calls.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(unavailable("attention", "triton") is not None, reason="needs Triton")
@grid(name=[name for name in TRITON if "dropout" not in name and "quantized" not in name])
def test_tritons_double_backward(name):
    """By the references: a gradient's gradient is there, and right."""
    function, reference, (x, *rest) = CALLS[name].both(CALLS[name].args(6, backend="triton"))

    def twice(run):
        torch.manual_seed(0)
        leaf = x.detach().requires_grad_()
        squares = sum(o.square().sum() for o in as_tuple(run(leaf, *rest)))
        (grad,) = torch.autograd.grad(squares, leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    with fusedops.backend("triton"):
        actual = twice(function)
    torch.testing.assert_close(actual, twice(reference), rtol=1e-3, atol=1e-4)


@grid(rounding=[(None, "bf16"), ("int8", None), ("fp8", "exact")], format=["int8", "nf4"])
def test_a_quantized_product_rounds_its_operands(format, rounding):
    operands, layout = (packed := quantized(format))[:3], packed[3:]
    x, bias = drawn(5, 64), drawn(24)
    y = quantized_linear.product(x, operands, bias, layout, "silu", *rounding)
    expected = references.quantized_linear_reference(x, *operands, bias, *layout, "silu", *rounding)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=0.1)


def test_they_are_torchs_functions():
    """Compares with functions that share no code with the references."""
    x, residual, weight, bias = drawn(3, 96), drawn(96, 3).T, drawn(96), drawn(96)
    near = torch.testing.assert_close
    near(functional.layer_norm(x, [96], weight, bias), F.layer_norm(x, [96], weight, bias))
    near(functional.rms_norm(x, [96], weight, 1e-5), F.rms_norm(x, [96], weight, 1e-5))
    y, h = functional.add_layer_norm(x, residual, weight, bias)
    near((y, h), (F.layer_norm(x + residual, [96], weight, bias), x + residual))
    near(functional.swiglu(x, residual), F.silu(x) * residual)
    near(functional.geglu(x), F.gelu(x[:, :48]) * x[:, 48:])
    q, k, v = drawn(2, 4, 6, 16), drawn(2, 4, 7, 16), drawn(2, 4, 7, 8)
    sdpa = F.scaled_dot_product_attention
    near(functional.scaled_dot_product_attention(q, k, v), sdpa(q, k, v))
    near(functional.attention(q, k, v), sdpa(q, k, v))
    head, target = drawn(10, 96), torch.tensor([1, -100, 9])
    loss = F.cross_entropy(x @ head.T, target)
    near(functional.linear_cross_entropy(x, head, target), loss)
    near(functional.cross_entropy(x @ head.T, target), loss)


GRAPHS = [name for name in TRITON if "dropout" not in name and "quantized" not in name]
GRAPHS += ["gated_activation swiglu limited separate", "gated_activation geglu tanh packed"]
GRAPHS += ["linear None", "linear silu", "rotary interleaved"]


@pytest.mark.parametrize("name", GRAPHS)
def test_compile(name):
    call = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call.function, backend="aot_eager", fullgraph=True)
    actual, eager = (
        gradients(*call.on_leaves(run, call.args(6))) for run in (compiled, call.function)
    )
    torch.testing.assert_close(actual, eager)


def test_compile_of_a_quantized_weight():
    operands, layout = (packed := quantized("int4"))[:3], packed[3:]
    compiled = torch.compile(quantized_linear.product, backend="aot_eager", fullgraph=True)
    args = drawn(5, 64), operands, drawn(24), layout, "silu"
    torch.testing.assert_close(compiled(*args), quantized_linear.product(*args))


def test_inductor_draws_the_dropout_of_eager():
    x, residual, weight, eps = drawn(15, 96), drawn(15, 96), drawn(96), 1e-5
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, options={"fallback_random": True})
    def compiled(x, residual):
        return functional.add_rms_norm(x, residual, weight, eps, dropout_p=0.5)

    torch.manual_seed(3)
    eager = functional.add_rms_norm(x, residual, weight, eps, dropout_p=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x, residual), eager)


def test_autocast_is_the_compiled_ones():
    x, w, b = drawn(5, 64), drawn(24, 64), drawn(24)
    q = functional.quantize_weight(w, "int8")
    heads = drawn(2, 4, 6, 16)
    with torch.autocast("cpu", BF16):
        assert functional.linear(x, w, b, "silu").dtype == BF16
        assert functional.quantized_linear(x, q, b).dtype == BF16
        assert functional.attention(heads, heads, heads).dtype == BF16
        assert functional.layer_norm(x, [64]).dtype == F32
        logits = x.bfloat16() @ w.bfloat16().T
        target = torch.arange(5)
        assert functional.cross_entropy(logits, target).dtype == F32
        loss = functional.linear_cross_entropy(x, w, target)
        assert loss.dtype == F32
        near = F.cross_entropy((x @ w.T).float(), target)
    torch.testing.assert_close(loss, near, rtol=2e-2, atol=2e-2)


def test_vmap_grad_and_double_backward():
    x, weight = drawn(4, 3, 8).double(), drawn(8).double()

    def loss(x):
        return functional.rms_norm(x, [8], weight, 1e-5).square().sum()

    each = torch.stack([torch.func.grad(loss)(row) for row in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), each)
    q = drawn(1, 2, 3, 4).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q: functional.attention(q, q, q, causal=True), q)


def test_meta_and_nested_tensors():
    x = torch.empty(3, 8, device="meta", dtype=BF16)
    assert functional.rms_norm(x, [8]).shape == (3, 8)
    heads = torch.empty(2, 4, 6, 16, device="meta")
    assert functional.attention(heads, heads, heads, dropout_p=0.5)[0].shape == (4, 6, 16)
    jagged = torch.nested.nested_tensor([drawn(2, 8), drawn(3, 8)], layout=torch.jagged)
    near = functional.swiglu(jagged, jagged).values()
    torch.testing.assert_close(near, functional.swiglu(jagged.values(), jagged.values()))
    strided = torch.nested.nested_tensor([drawn(2, 8)])
    with pytest.raises(TypeError, match="swiglu: gate must be a dense tensor, got a nested one"):
        functional.swiglu(strided, strided)


def a_quantized(**options):
    weight = functional.quantize_weight(drawn(4, 64), "int8")
    return functional.quantized_linear(drawn(2, 64), weight, **options)


BAD = {message: call for record in FAMILIES.values() for message, call in record.errors.items()}
BAD |= {
    "cross_entropy: target must be a class from 0 to 7 .* got 9 in row 1": (
        lambda: functional.cross_entropy(drawn(2, 8), torch.tensor([0, 9]))
    ),
    "attention: k's heads must divide q's, 4, got 3": lambda: functional.attention(
        drawn(1, 4, 5, 8), drawn(1, 3, 5, 8), drawn(1, 3, 5, 8)
    ),
    "attention: cu_seqlens_q must grow from 0 to at most 4": lambda: functional.attention(
        *[drawn(4, 2, 8)] * 3,
        cu_seqlens_q=torch.tensor([0, 5]),
        cu_seqlens_k=torch.tensor([0, 4]),
    ),
    "attention: dropout_p must be from 0 to 1, got 2": lambda: functional.attention(
        *[drawn(1, 4, 5, 8)] * 3, dropout_p=2.0
    ),
    "compute must be None, .* got 'fp4'": lambda: a_quantized(compute="fp4"),
    r"quantized_linear: bias must have shape \[4\]": lambda: a_quantized(bias=drawn(5)),
    "adamw_squares: grads must be float32, float16 or bfloat16": (
        lambda: torch.ops.fusedops.adamw_squares([drawn(3).double()])
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_operator_and_argument(message):
    with pytest.raises((RuntimeError, ValueError, IndexError), match=message):
        BAD[message]()


def test_patched_llama_trains():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    model = copy.deepcopy(plain)
    assert "norm" in str(fusedops.patch(model))
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    for m in (plain, model):
        m(input_ids=ids, labels=ids).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
        b.grad = a.grad.clone()  # a first step divides by |gradient|: rounding would be all of it
    torch.optim.AdamW(plain.parameters(), 1e-2).step()
    optim.AdamW(model.parameters(), 1e-2).step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    fusedops.verify(model, {"input_ids": ids, "labels": ids})
    fusedops.unpatch(model)
    assert type(model) is type(plain)


def test_a_quantized_model_is_near():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    x = drawn(3, 64)
    before = model(x)
    fusedops.quantize(model, "int8")
    assert (model(x) - before).norm() < 0.05 * before.norm()


def test_backend_cpu_says_why():
    with pytest.raises(RuntimeError, match="cannot run: no compiled part: FUSEDOPS_COMPILED=0"):
        fusedops.backend("cpu").__enter__()
    with fusedops.backend("reference"):
        functional.layer_norm(drawn(3, 8), [8])


def test_the_report_says_why():
    first = fusedops.env_report().splitlines()[0]
    assert "not compiled: FUSEDOPS_COMPILED=0" in first
    assert first.endswith(". Load it: unset FUSEDOPS_COMPILED")


def optimizers():
    """Steps of every kind of state; the compiled part's process compares the parameters."""
    tensors = {}
    for name, dtype, options in (
        ("float32", F32, {}),
        ("amsgrad", F32, {"amsgrad": True, "maximize": True}),
        ("clipped", F32, {"max_grad_norm": 0.5}),
        ("bfloat16", BF16, {"state_dtype": "bfloat16"}),
        ("int8", BF16, {"state_dtype": "int8", "min_8bit_size": 1}),
        ("remainder", BF16, {"master_weights": "remainder"}),
    ):
        params = [torch.nn.Parameter(drawn(*shape).to(dtype)) for shape in ((40, 33), (300,))]
        optimizer = optim.AdamW(params, 1e-2, weight_decay=0.1, **options)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = (drawn(*p.shape) * (step + 1 + i)).to(dtype)
            optimizer.step()
        tensors |= {f"{name} {i}": p.detach().clone() for i, p in enumerate(params)}
    p = torch.nn.Parameter(drawn(50))
    p.grad = drawn(50)
    tensors["norm"] = functional.clip_grad_norm_([p], 1.0)
    tensors["clipped gradient"] = p.grad
    return tensors


EXPORTS = [
    *(("test_modules", name) for name in ("GEGLU", "Linear, gelu", "rotary_embedding")),
    *(("test_modules", name) for name in ("QuantizedLinear, int8", "quantize_weight")),
    *(("test_modules", name) for name in ("dequantize_weight", "add_rms_norm")),
    *(("test_losses", name) for name in ("cross_entropy, modified", "linear_cross_entropy")),
    ("test_attention", "all"),
]


@pytest.mark.parametrize("test,name", EXPORTS)
def test_exports_to_onnx(test, name):
    pytest.importorskip("onnxruntime")
    getattr(importlib.import_module("contract.test_onnx"), test)(name)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(optimizers(), Path(sys.argv[1]))
