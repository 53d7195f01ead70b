"""The `experts` function and module with quantized weights; each expert is quantized separately."""

import pickle
from dataclasses import replace

import pytest
import torch
from axes import grid

import fusedops
from experts.cases import BACKENDS, FLOATS, FORMATS, Shape, inputs, quantized, with_codes
from fusedops.functional import (
    dequantize_experts,
    dequantize_weight,
    experts,
    quantize_experts,
    quantize_weight,
)
from fusedops.references.experts import experts_reference
from fusedops.testing import device_of, gradients, placed, poisoned, within

CASES = [(kind, name) for kind in FORMATS for name in BACKENDS]
GPT_OSS = {"interleaved": True, "limit": 1.25, "alpha": 1.702, "up_offset": 1.0}


def rest(shape, dtype=torch.float32, seed=12, **options):
    """The arguments that are not weights."""
    args = inputs(shape, dtype, seed, **options)
    return (*args[:3], *args[5:]) if shape.bias else args[:3]


def compare(kind, backend, shape, dtype, forward_alone=False, **options):
    """Over several inputs: rounding to bfloat16 is luck for the few elements of one."""
    gate = {} if options.pop("wide", True) else {"wide": False}
    run, reference = (
        with_codes(f, kind, shape, **gate, **options) for f in (experts, experts_reference)
    )
    seeds = range(8 if shape.tokens < 20 else 3)
    draws = [rest(shape, dtype, seed, gated=not gate) for seed in seeds]
    actual, eager, exact = {}, {}, {}
    for args in draws:
        here = placed(args, device_of(backend))
        with fusedops.backend(backend), poisoned():
            collect(actual, gradients(run, here))
        collect(eager, gradients(reference, here))
        wide = tuple(a.double() if a.is_floating_point() else a for a in here)
        collect(exact, gradients(reference, wide))
    assert actual.keys() == eager.keys()
    only = {"output 0"} if forward_alone else actual.keys()
    for key in only:
        complaint = within(*(torch.stack(t[key]) for t in (actual, eager, exact)), rows=False)
        assert complaint is None, f"{key}: {complaint}"
        assert actual[key][0].dtype == eager[key][0].dtype


def collect(into, results):
    for key, value in results.items():
        into.setdefault(key, []).append(value)


# A row for an expert, few, and many; odd sizes; sizes of whole blocks of codes; sentinels.
SHAPES = [
    Shape(1, 2, 5, 128, 64, bias=True),
    Shape(7, 2, 3, 33, 15, bias=True),
    Shape(12, 3, 6, 256, 128),
    Shape(40, 2, 3, 130, 66, bias=True, sentinels=True),
    Shape(150, 2, 3, 192, 70),
]


@grid("kind,backend", CASES, dtype=FLOATS, shape=SHAPES)
def test_forward_and_gradients(kind, backend, dtype, shape):
    compare(kind, backend, shape, dtype)


@grid("kind,backend", CASES, compute=["exact", "bf16"])
def test_each_precision(kind, backend, compute):
    for shape in (SHAPES[0], SHAPES[3]):
        compare(kind, backend, shape, torch.float32, compute=compute)


@grid("kind,backend", CASES)
def test_other_gates(kind, backend):
    shape = Shape(9, 2, 3, 64, 32, bias=True)
    compare(kind, backend, shape, torch.float32, **GPT_OSS)
    compare(kind, backend, shape, torch.float32, activation="gelu", wide=False)


@grid(backend=BACKENDS, kind=FORMATS)
def test_every_number_of_rows(backend, kind):
    for rows in (*range(2, 20), 33, 60):
        compare(kind, backend, Shape(rows, 1, 1, 64, 32), torch.float32, forward_alone=True)


@grid(
    backend=BACKENDS,
    kind=FORMATS,
    shape=[Shape(0, 2, 3, 8, 4), Shape(3, 0, 3, 8, 4), Shape(3, 1, 2, 8, 0)],
)
def test_empty(backend, kind, shape):
    run, reference = (with_codes(f, kind, shape) for f in (experts, experts_reference))
    args = placed(rest(shape), device_of(backend))
    with fusedops.backend(backend), poisoned():
        actual = gradients(run, args)
    torch.testing.assert_close(actual, gradients(reference, args))


@grid(backend=BACKENDS, kind=FORMATS)
def test_an_expert_without_tokens_is_not_read(backend, kind):
    args = list(inputs(Shape(8, 2, 5, 64, 32, bias=True)))
    codes = quantized(kind, *args[3:5])
    args[1][args[1] == 2] = 3
    expected = experts(*args[:3], *codes)
    for q in codes:
        q.scales[2] = torch.nan
    with fusedops.backend(backend), poisoned():
        leaf = args[0].clone().requires_grad_()
        actual = experts(leaf, *args[1:3], *codes)
        actual.sum().backward()
    torch.testing.assert_close(actual, expected)
    assert leaf.grad.isfinite().all()


@grid("kind,backend", CASES, bad=[float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_token(kind, backend, bad):
    for shape in (Shape(6, 2, 3, 64, 32), Shape(90, 2, 3, 64, 32)):
        run = with_codes(experts, kind, shape)
        args = placed(rest(shape), device_of(backend))
        with fusedops.backend(backend):
            clean = run(*args)
            args[0][2, 5] = bad
            out = run(*args)
        others = torch.arange(len(out)) != 2
        assert torch.equal(out[others], clean[others]) and not out[2].isfinite().any()


@grid(kind=FORMATS)
def test_float64(kind):
    """Without a kernel for it: one product for each expert, of codes that are exact in float32."""
    shape = Shape(9, 3, 4, 10, 7, bias=True, sentinels=True)
    args = rest(shape, torch.float64)
    run, reference = (with_codes(f, kind, shape) for f in (experts, experts_reference))
    actual, expected = gradients(run, args), gradients(reference, args)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_compiles_without_a_graph_break(kind):
    torch._dynamo.reset()  # both kinds are one function
    shape = Shape(9, 2, 4, 64, 32, bias=True)
    run, args = with_codes(experts, kind, shape), rest(shape)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    actual, expected = gradients(compiled, args), gradients(run, args)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_autocast():
    shape = Shape(9, 2, 4, 64, 32, bias=True)
    run, args = with_codes(experts, "nf4", shape), rest(shape)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*args)
    low = (a if i in (1, 2) else a.bfloat16() for i, a in enumerate(args))
    assert torch.equal(out, run(*low)) and out.dtype == torch.bfloat16


@grid(kind=FORMATS)
def test_each_expert_is_quantized_by_itself(kind):
    format, options = FORMATS[kind]
    weight = torch.randn(3, 10, 49)
    codes = quantize_experts(weight, format, **options)
    assert codes.shape == weight.shape
    for e in range(3):
        expert_codes = quantize_weight(weight[e], format, **options)
        for name, t in expert_codes.tensors().items():
            assert torch.equal(codes.tensors()[name][e].view(torch.uint8), t.view(torch.uint8))
        assert torch.equal(dequantize_experts(codes)[e], dequantize_weight(expert_codes))
    assert quantize_experts(weight[:0], format, **options).shape == (0, 10, 49)


def test_errors_name_the_argument():
    args = inputs(Shape(4, 2, 3, 64, 64))[:5]
    codes = quantized("int8", *args[3:5])
    expert_weight = quantize_weight(args[3][0], "int8")
    trained = codes[1].scales.clone().requires_grad_()
    wrong = {
        r"gate_up must be a QuantizedWeight from quantize_experts .* got one expert's": (
            TypeError, (expert_weight, codes[1]), {}
        ),
        r"down must be a QuantizedWeight .* got Tensor": (TypeError, (codes[0], args[4]), {}),
        "both weights must have one format, got int8 and nf4": (
            ValueError, (codes[0], quantized("nf4", args[4])[0]), {}
        ),
        "transposed needs weights that are tensors": (ValueError, codes, {"transposed": True}),
        "compute must be None, 'exact' or 'bf16', got 'int8'": (
            ValueError, codes, {"compute": "int8"}
        ),
        "compute needs QuantizedWeights, got 'exact' with tensors": (
            ValueError, args[3:5], {"compute": "exact"}
        ),
        r"gate_up must be \[E, N, H\] and down \[E, H, I\]": (RuntimeError, codes[::-1], {}),
        r"experts: down.scales must be float32 \[3, 64, 1\], got float32 \[3, 64, 2\]": (
            RuntimeError, (codes[0], replace(codes[1], scales=torch.ones(3, 64, 2))), {}
        ),
        "experts: scales must not require a gradient": (
            RuntimeError, (codes[0], replace(codes[1], scales=trained)), {}
        ),
    }  # fmt: skip
    for message, (kind, weights, options) in wrong.items():
        with pytest.raises(kind, match=message):
            experts(*args[:3], *weights, **options)
    with pytest.raises(TypeError, match=r"weight must be floating-point \[E, N, K\], got"):
        quantize_experts(args[3][0], "int8")
    with pytest.raises(TypeError, match="qweight must be a QuantizedWeight from quantize_weight"):
        fusedops.functional.quantized_linear(args[0], codes[0])


# The module


@grid(kind=["int4", "nf4", "fp8"], bias=[False, True])
def test_module_loads_floats_and_codes(kind, bias):
    floats = fusedops.nn.Experts(4, 64, 32, bias=bias)
    first, second = (fusedops.nn.QuantizedExperts(4, 64, 32, bias=bias, format=kind) for _ in "ab")
    first.load_state_dict(floats.state_dict())
    args = inputs(Shape(9, 2, 4, 64, 32))[:3]
    codes = quantized(kind, floats.gate_up_proj, floats.down_proj)
    biases = {"gate_up_bias": floats.gate_up_proj_bias, "down_bias": floats.down_proj_bias}
    assert torch.equal(first(*args), experts(*args, *codes, **biases))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(*args), first(*args))
    low = second.bfloat16()
    assert low.gate_up_proj.quantized_weight.scales.dtype == torch.float32
    assert (
        low(*(a.bfloat16() if a.is_floating_point() else a for a in args)).dtype == torch.bfloat16
    )


def test_module_loads_transposed_floats():
    args = inputs(Shape(9, 2, 4, 64, 32), transposed=True)
    module = fusedops.nn.QuantizedExperts(4, 64, 32, format="nf4", transposed=True)
    module.load_state_dict({"gate_up_proj": args[3], "down_proj": args[4]})
    codes = quantized("nf4", *(w.transpose(1, 2) for w in args[3:5]))
    assert torch.equal(module(*args[:3]), experts(*args[:3], *codes))


def test_module_errors():
    with pytest.raises(ValueError, match="activation must be one of"):
        fusedops.nn.QuantizedExperts(3, 4, 5, activation="tanh")
    with pytest.raises(ValueError, match="format must be one of"):
        fusedops.nn.QuantizedExperts(3, 4, 5, format="int3")
    with pytest.raises(ValueError, match="compute must be None, 'exact' or 'bf16', got 'int8'"):
        fusedops.nn.QuantizedExperts(3, 4, 5, compute="int8")
    with pytest.raises(ValueError, match="scale of nf4 must be 'absmax' or 'mse', got"):
        fusedops.nn.QuantizedExperts(3, 4, 5, format="nf4", scale="largest")
    module = fusedops.nn.QuantizedExperts(3, 4, 5)
    with pytest.raises(RuntimeError, match=r"down_proj: .* must be floating-point"):
        module.load_state_dict({"down_proj": torch.zeros(3, 4, 5).int()}, strict=False)
    with pytest.raises(RuntimeError, match=r"gate_up_proj: .* must be \(3, 10, 4\), got"):
        module.load_state_dict({"gate_up_proj": torch.zeros(3, 10, 5)}, strict=False)
    other = fusedops.nn.QuantizedExperts(3, 4, 5, format="fp8")  # of the same shapes
    with pytest.raises(RuntimeError, match=r"down_proj\.qweight must be int8, got float8"):
        module.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "fp8"])
def test_module_is_pickled(kind):
    args = inputs(Shape(9, 2, 4, 64, 32))
    module = fusedops.nn.QuantizedExperts(4, 64, 32, format=kind)
    module.load_state_dict({"gate_up_proj": args[3], "down_proj": args[4]})
    other = pickle.loads(pickle.dumps(module))
    assert [t.dtype for t in other.buffers()] == [t.dtype for t in module.buffers()]
    assert torch.equal(other(*args[:3]), module(*args[:3]))
