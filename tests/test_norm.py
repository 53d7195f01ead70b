"""layer_norm, rms_norm, add_layer_norm, add_rms_norm: every backend through the same lines."""

import pytest
import torch
from torch import nn

import fusedops
from fusedops.functional import add_layer_norm, add_rms_norm, layer_norm, norm, rms_norm
from fusedops.testing import backends, check, gradients, yardstick

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# one element, odd, 3-D, past a power of two, many short rows, one long row
SHAPES = [(1, 1), (7, 33), (2, 3, 1024), (3, 4099), (130, 5), (1, 70001)]
FUNCTIONS = {
    "layer_norm": (layer_norm, norm.layer_norm_reference),
    "rms_norm": (rms_norm, norm.rms_norm_reference),
    "add_layer_norm": (add_layer_norm, norm.add_layer_norm_reference),
    "add_rms_norm": (add_rms_norm, norm.add_rms_norm_reference),
}
CASES = [(op, name) for op in FUNCTIONS for name in backends(op) if name != "reference"]


def inputs(op, shape, dtype, weight_dtype=None, residual_dtype=None):
    """The arguments of `op`. eps is explicit: its default is another one in float64."""
    draw = torch.Generator().manual_seed(12)
    x, residual = (torch.randn(shape, generator=draw) * 3 + 0.5 for _ in range(2))
    weight, bias = (torch.randn(shape[-1:], generator=draw) for _ in range(2))
    weight, bias = (t.to(weight_dtype or dtype) for t in (weight, bias))
    # all that a row of one element has of a gradient is its eps
    eps = 1e-6
    if shape[-1] == 1:
        x, residual, eps = x / 8, residual / 8, 0.5
    parameters = (weight, bias, eps) if "layer" in op else (weight, eps)
    x = x.to(dtype)
    if "add" in op:
        return (x, residual.to(residual_dtype or dtype), *parameters)
    return (x, shape[-1:], *parameters)


def interpreted_bf16(backend, *dtypes):
    """Triton's interpreter truncates when it stores bfloat16: its results mean nothing."""
    if backend == "triton" and not torch.cuda.is_available() and torch.bfloat16 in dtypes:
        pytest.skip("the interpreter's bfloat16 is wrong")


def compare(op, backend, args, **kwargs):
    function, reference = FUNCTIONS[op]
    check(function, reference, args, backend, **kwargs)


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(op, backend, dtype, shape):
    interpreted_bf16(backend, dtype)
    compare(op, backend, inputs(op, shape, dtype))


@pytest.mark.parametrize("op,backend", CASES)
def test_more_rows_than_are_added_at_a_time(op, backend):
    compare(op, backend, inputs(op, (400, 513), torch.float16))


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_parameters(op, backend, dtype):
    interpreted_bf16(backend, dtype)
    args = inputs(op, (7, 130), dtype)
    none = (None, None) if "layer" in op else (None,)
    compare(op, backend, (*args[:2], *none, 1e-6))
    if "layer" in op:
        compare(op, backend, (*args[:2], args[2], None))
        compare(op, backend, (*args[:2], None, args[3]))


@pytest.mark.parametrize("op,backend", [c for c in CASES if "rms" in c[0]])
@pytest.mark.parametrize("rounding", ["torch", "llama"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_roundings(op, backend, rounding, offset, weight_dtype):
    interpreted_bf16(backend, weight_dtype)
    for dtype in FLOATS[: 3 if backend == "cpu" else 2]:
        args = inputs(op, (5, 200), dtype, weight_dtype)
        compare(op, backend, args, rounding=rounding, offset=offset)


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weight_in_another_dtype(op, backend, dtype, weight_dtype):
    interpreted_bf16(backend, dtype, weight_dtype)
    compare(op, backend, inputs(op, (9, 77), dtype, weight_dtype))


@pytest.mark.parametrize("op,backend", [c for c in CASES if "add" in c[0]])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("residual_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_in_another_dtype(op, backend, dtype, residual_dtype, weight_dtype):
    interpreted_bf16(backend, dtype, residual_dtype, weight_dtype)
    compare(op, backend, inputs(op, (6, 90), dtype, weight_dtype, residual_dtype))


@pytest.mark.parametrize("op,backend", [c for c in CASES if "layer" in c[0]])
def test_bias_in_another_dtype_than_weight(op, backend):
    *args, bias, eps = inputs(op, (64, 40), torch.float32, torch.float16)
    compare(op, backend, (*args, bias.float(), eps))


@pytest.mark.parametrize("op,backend", [c for c in CASES if "add" in c[0]])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout(op, backend, dtype, p):
    interpreted_bf16(backend, dtype)
    for shape in [(3, 70), (2, 3, 1027)]:
        compare(op, backend, inputs(op, shape, dtype), dropout_p=p)


@pytest.mark.parametrize("op,backend", [c for c in CASES if "add" in c[0]])
def test_dropping_everything_leaves_the_residual(op, backend):
    with fusedops.backend(backend):
        found = gradients(FUNCTIONS[op][0], inputs(op, (5, 70), torch.float32), dropout_p=1.0)
    assert torch.equal(found["output 1"], inputs(op, (5, 70), torch.float32)[1])
    assert not found["gradient 0"].any() and found["gradient 1"].all()


@pytest.mark.parametrize("op,backend", [c for c in CASES if "rms" in c[0]])
@pytest.mark.parametrize("rounding", ["torch", "llama"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounds_where_the_reference_does(op, backend, rounding, offset, weight_dtype):
    """The yardstick cannot see a rounding that is left out: the bits can.

    A sum in another order may flip one rounding in 10,000 in bfloat16; a wrong rounding flips
    one in 4.
    """
    dtype = torch.float16 if weight_dtype == torch.float32 else weight_dtype
    interpreted_bf16(backend, dtype)
    args = inputs(op, (50, 1000), dtype, weight_dtype)
    function, reference = FUNCTIONS[op]
    with fusedops.backend(backend):
        found = function(*args, rounding=rounding, offset=offset)
    expected = reference(*args, rounding=rounding, offset=offset)
    if "add" in op:
        found, expected = found[0], expected[0]
    assert found.dtype == expected.dtype
    # beside a float32 weight a flip shows as a difference larger than float32's own noise
    differs = (found - expected).abs() > 4e-7 * expected.abs()
    # the more steps, the more flips
    finer = torch.finfo(torch.bfloat16).eps / torch.finfo(dtype).eps
    assert differs.sum() <= found.numel() * finer / 10_000


@pytest.mark.parametrize("op,backend", CASES)
def test_float64_is_exact(op, backend):
    function, reference = FUNCTIONS[op]
    args = inputs(op, (4, 50), torch.float64)
    with fusedops.backend(backend):
        found = gradients(function, args)
    for key, value in gradients(reference, args).items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_reference_gradcheck(op):
    args = inputs(op, (3, 6), torch.float64)
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    assert torch.autograd.gradcheck(FUNCTIONS[op][1], args)


LAYOUTS = {
    "transposed": lambda make: make(64, 12).t(),
    "slice of rows": lambda make: make(12, 96)[:, 3:67],
    "every second column": lambda make: make(12, 128)[:, ::2],
    "expanded": lambda make: make(1, 64).expand(12, 64),
    "misaligned": lambda make: make(12 * 64 + 1)[1:].view(12, 64),
    "transposed batch": lambda make: make(4, 3, 64).transpose(0, 1),
}


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strides(op, backend, layout, dtype):
    def view():
        return LAYOUTS[layout](lambda *shape: torch.randn(shape, dtype=dtype))

    other = view() if "add" in op else (64,)
    parameters = [torch.randn(2 * 64, dtype=dtype)[::2] for _ in range(1 + ("layer" in op))]
    compare(op, backend, (view(), other, *parameters, 1e-6))


@pytest.mark.parametrize("op,backend", CASES)
def test_strided_output_gradients(op, backend):
    function, reference = FUNCTIONS[op]
    args = inputs(op, (12, 64), torch.float32)

    def transposed(run):
        def call(*args):
            outputs = run(*args)
            return tuple(o.t() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))

        return call

    check(transposed(function), transposed(reference), args, backend)


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty(op, backend, shape):
    compare(op, backend, inputs(op, shape, torch.float32))


@pytest.mark.parametrize("op,backend", CASES)
def test_several_normalised_dimensions(op, backend):
    x, residual = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    parameters = [torch.randn(5, 6) for _ in range(1 + ("layer" in op))]
    compare(op, backend, (x, residual if "add" in op else (5, 6), *parameters, 1e-6))


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(op, backend, bad):
    args = inputs(op, (4, 70), torch.float32)
    args[0][2, 5] = bad
    compare(op, backend, args)


@pytest.mark.parametrize("op,backend", [c for c in CASES if c[1] != "triton"])
def test_longest_row(op, backend):
    for dtype in (torch.float32, torch.bfloat16):
        compare(op, backend, inputs(op, (2, 262144), dtype))


@pytest.mark.parametrize("op,backend", CASES)
def test_large_mean_keeps_its_variance(op, backend):
    args = inputs(op, (3, 1000), torch.float32)
    args[0].add_(1e4)
    compare(op, backend, args)


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("which", range(4))
def test_only_one_gradient(op, which):
    function, reference = FUNCTIONS[op]
    args = inputs(op, (40, 33), torch.float32)
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    if which >= len(tensors):
        pytest.skip("fewer arguments")
    leaf = tensors[which]

    def alone(run):
        return lambda *args: run(
            *(a.detach() if i in tensors and i != leaf else a for i, a in enumerate(args))
        )

    check(alone(function), alone(reference), args, "cpu")


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("used", [0, 1])
def test_unused_output(function, used):
    reference = FUNCTIONS[function.__name__][1]
    args = inputs(function.__name__, (5, 33), torch.float32)
    check(lambda *a: function(*a)[used], lambda *a: reference(*a)[used], args, "cpu")


def test_h_needs_no_gradient_when_only_the_weight_does():
    x = torch.randn(4, 8)
    y, h = add_rms_norm(x, x, torch.ones(8, requires_grad=True))
    assert y.requires_grad and not h.requires_grad


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_double_backward(op, p):
    if p and "add" not in op:
        pytest.skip("no dropout")
    function, reference = FUNCTIONS[op]
    args = inputs(op, (6, 40), torch.float32)
    kwargs = {"dropout_p": p} if p else {}

    def second(run, args):
        leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
        inner = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        torch.manual_seed(3)
        outputs = run(*leaves, **kwargs)
        loss = sum(o.sin().sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))
        first = torch.autograd.grad(loss, inner, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inner)

    exact = second(reference, [a.double() if isinstance(a, torch.Tensor) else a for a in args])
    for found, eager, e in zip(second(function, args), second(reference, args), exact, strict=True):
        assert yardstick(found, eager, e) is None


@pytest.mark.parametrize("op", FUNCTIONS)
def test_forward_mode_and_functorch(op):
    function, reference = FUNCTIONS[op]
    x, *rest = inputs(op, (4, 9), torch.float32)
    t = torch.randn_like(x)

    def first(run):
        def call(x):
            out = run(x, *rest)
            return out[0] if isinstance(out, tuple) else out

        return call

    for transform in (
        lambda f: torch.func.jvp(f, (x,), (t,))[1],
        lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
        lambda f: torch.func.vmap(f)(torch.stack([x, t])),
        lambda f: torch.func.jacrev(f)(x),
    ):
        torch.testing.assert_close(transform(first(function)), transform(first(reference)))


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


def test_composite_backward_rounds_once():
    x = torch.randn(50, 64).bfloat16()

    def loss(run):
        return lambda t: run(t, (64,), None, 1e-6).float().square().sum()

    eager = torch.func.grad(loss(norm.rms_norm_reference))(x)
    exact = torch.func.grad(loss(norm.rms_norm_reference))(x.double())
    assert yardstick(torch.func.grad(loss(rms_norm))(x), eager, exact) is None


def test_complex_and_nested_inputs_go_to_torch():
    z = torch.randn(3, 8, dtype=torch.complex64)
    assert torch.equal(rms_norm(z, (8,)), nn.functional.rms_norm(z, (8,)))
    parts = [torch.randn(2, 8), torch.randn(5, 8)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        found = layer_norm(nested, (8,), torch.ones(8), torch.zeros(8))
        for part, normed in zip(parts, found.unbind(), strict=True):
            torch.testing.assert_close(normed, nn.functional.layer_norm(part, (8,)))


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_same_bits_each_time_and_whatever_the_rows(op, dtype):
    function, _ = FUNCTIONS[op]
    args = inputs(op, (300, 257), dtype)
    first, again = gradients(function, args), gradients(function, args)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        threaded = gradients(function, args)
    finally:
        torch.set_num_threads(threads)
    for key, value in first.items():
        assert torch.equal(value, again[key]) and torch.equal(value, threaded[key])
    few = function(*(a[:7] if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args))
    few = few if isinstance(few, tuple) else (few,)
    assert all(torch.equal(part, first[f"output {i}"][:7]) for i, part in enumerate(few))


@pytest.mark.parametrize("op", FUNCTIONS)
def test_gradients_are_never_written_to(op):
    args = inputs(op, (6, 40), torch.float32)
    leaves = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    outputs = FUNCTIONS[op][0](*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(o) for o in outputs]
    kept = [c.clone() for c in cotangents]
    torch.autograd.backward(outputs, cotangents)
    assert all(map(torch.equal, cotangents, kept))


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
def test_dropout_follows_manual_seed_and_keeps_its_share(function):
    x, residual = torch.ones(400, 500), torch.zeros(400, 500)

    def draw(seed):
        torch.manual_seed(seed)
        return function(x, residual, dropout_p=0.3)[1]

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    kept = draw(1)
    assert torch.equal(kept.unique(), torch.tensor([0, 1 / 0.7]))
    share = (kept == 0).double().mean().item()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / x.numel()) ** 0.5  # five standard deviations


@pytest.mark.parametrize("op", FUNCTIONS)
def test_inference_mode_and_requires_grad(op):
    function, reference = FUNCTIONS[op]
    args = inputs(op, (4, 33), torch.float32)
    with torch.inference_mode():
        found = function(*args)
    torch.testing.assert_close(found, reference(*args))
    if "add" in op:
        assert not function(*args)[0].requires_grad


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(op, dtype):
    args = inputs(op, (3, 4, 20), dtype)
    leaves = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    torch.library.opcheck(getattr(torch.ops.fusedops, op), leaves)


@pytest.mark.parametrize("kind", ["layer", "rms", "rms_llama"])
@pytest.mark.parametrize("add", [True, False])
def test_opcheck_kernels(kind, add):
    x, residual, dy = (torch.randn(5, 20) for _ in range(3))
    weight, seed = torch.randn(20), torch.tensor(7)
    p, seed = (0.5, seed) if add else (0.0, None)
    how = (1, 1e-5, kind, 0.0, p, seed)
    args = (x, residual if add else None, weight, None, *how)
    forward, backward = torch.ops.fusedops.norm_forward, torch.ops.fusedops.norm_backward
    torch.library.opcheck(forward, args)
    _, h, stats = forward(*args)
    h = h if add else x
    mask = [True, add, True, False]
    torch.library.opcheck(backward, (dy, None, h, weight, None, stats, 1, *how[2:], mask))


def test_kernels_refuse_to_be_differentiated():
    x = torch.randn(3, 8, requires_grad=True)
    y, _, _ = torch.ops.fusedops.norm_forward(x, None, None, None, 1, 1e-5, "layer", 0.0, 0.0, None)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


@pytest.mark.parametrize("op", FUNCTIONS)
def test_compile_with_dynamic_shapes(op):
    function, _ = FUNCTIONS[op]

    def step(x, *rest):
        out = function(x * 2, *rest)
        return out if isinstance(out, tuple) else (out,)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        args = inputs(op, (rows, 24), torch.float32)
        found, expected = gradients(compiled, args), gradients(step, args)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)


def test_compile_with_dropout_runs_the_same_mask_in_backward():
    step = torch.compile(lambda x, r: add_layer_norm(x, r, dropout_p=0.5)[1], fullgraph=True)
    x = torch.randn(20, 64, requires_grad=True)
    h = step(x, torch.zeros(20, 64))
    (dx,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(dx != 0, h != 0)


def test_compiled_composite_runs_the_same_mask_in_backward():
    compiled = torch.compile(lambda x, r: add_layer_norm(x, r, dropout_p=0.5)[1], fullgraph=True)
    x = torch.randn(20, 64, dtype=torch.float64, requires_grad=True)  # float64 has no kernel
    h = compiled(x, torch.zeros_like(x))
    (dx,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(dx != 0, h != 0)


def test_dropout_mask_is_the_reference_and_opaque_to_the_compiler():
    torch.manual_seed(5)
    expected = norm.dropout_reference(torch.ones(20, 65), 0.5) != 0
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, ())
    mask = torch.ops.fusedops.dropout_mask
    assert torch.equal(mask(seed, 20, 65, 0.5), expected)
    assert torch.equal(torch.compile(mask, fullgraph=True)(seed, 20, 65, 0.5), expected)
    torch.library.opcheck(mask, (seed, 20, 65, 0.5))


def test_checkpoint_runs_the_same_mask_in_backward():
    x = torch.randn(20, 64, requires_grad=True)
    call = torch.utils.checkpoint.checkpoint
    h = call(lambda x: add_rms_norm(x, x * 0, dropout_p=0.5)[1], x, use_reentrant=False)
    (dx,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(dx != 0, h != 0)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_export(op):
    function, _ = FUNCTIONS[op]

    class Module(nn.Module):
        def forward(self, *args):
            return function(*args)

    args = inputs(op, (4, 24), torch.float32)
    if "add" not in op:
        args = (args[0], [24], *args[2:])
    program = torch.export.export(Module(), args)
    torch.testing.assert_close(program.module()(*args), function(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_as_torch(dtype):
    x, w = torch.randn(4, 16, dtype=dtype), torch.randn(16)
    with torch.autocast("cpu", torch.bfloat16):
        for ours, theirs in (
            (layer_norm(x, (16,), w, w), nn.functional.layer_norm(x, (16,), w, w)),
            (rms_norm(x, (16,), w), nn.functional.rms_norm(x, (16,), w)),
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_autocast_runs_norms_in_float32(op, residual_dtype):
    # the kernel of the AutocastCUDA key, which needs no GPU
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    args = inputs(op, (4, 33), torch.bfloat16, torch.float32, residual_dtype)
    rounding = {"rounding": "torch"} if "rms" in op else {}
    found = getattr(torch.ops.fusedops, op).default.redispatch(key, *args, **rounding)
    if "add" in op:
        found, h = found
        assert torch.equal(h, args[0] + args[1])
        args = (h, (33,), *args[2:])
    norm_of_h = nn.functional.layer_norm if "layer" in op else nn.functional.rms_norm
    torch.testing.assert_close(found, norm_of_h(args[0].float(), *args[1:]))


def test_unused_y_takes_no_part():
    x = torch.randn(4, 8, requires_grad=True)
    with torch.no_grad():
        x[1, 2] = torch.inf
    residual = torch.zeros(4, 8, requires_grad=True)
    _, h = add_layer_norm(x, residual)
    h.mul_(2)  # nothing that the gradient needs
    for gradient in torch.autograd.grad(h.sum(), (x, residual)):
        assert torch.equal(gradient, torch.full((4, 8), 2.0))


ERRORS = {
    r"add_layer_norm: residual must be float32 \[4, 8\] like x, got float32 \[4, 9\]": lambda: (
        add_layer_norm(torch.zeros(4, 8), torch.zeros(4, 9))
    ),
    r"add_rms_norm: weight must have shape \[8\].*got float32 \[9\]": lambda: add_rms_norm(
        torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(9)
    ),
    r"layer_norm: input must be float32, .*got int64 \[4, 8\]": lambda: layer_norm(
        torch.zeros(4, 8, dtype=torch.int64), (8,)
    ),
    r"layer_norm: normalized_shape must be the end of .*\[4, 8\], got \[7\]": lambda: layer_norm(
        torch.zeros(4, 8), (7,)
    ),
    r"rms_norm: normalized_shape must name at least one": lambda: rms_norm(torch.zeros(4), ()),
    r"rms_norm: rounding must be 'torch' or 'llama', got 'gemma'": lambda: rms_norm(
        torch.zeros(4), (4,), rounding="gemma"
    ),
    r"add_rms_norm: dropout_p must be in \[0, 1\], got 1.5": lambda: add_rms_norm(
        torch.zeros(4), torch.zeros(4), dropout_p=1.5
    ),
    r"layer_norm: weight must be on cpu like input, got meta": lambda: layer_norm(
        torch.zeros(4), (4,), torch.zeros(4, device="meta")
    ),
    r"layer_norm: bias must be float32, .*got int32 \[4\]": lambda: layer_norm(
        torch.zeros(4), (4,), None, torch.zeros(4, dtype=torch.int32)
    ),
    r"add_rms_norm: weight must have at least one dimension, got float32 \[\]": lambda: (
        add_rms_norm(torch.zeros(4), torch.zeros(4), torch.ones(()))
    ),
    r"AddRMSNorm: x must end in normalized_shape \[12\], got \[4, 8\]": lambda: (
        fusedops.nn.AddRMSNorm(12, elementwise_affine=False)(torch.zeros(4, 8), torch.zeros(4, 8))
    ),
    r"add_layer_norm: x must have at least 1 dimension": lambda: add_layer_norm(
        torch.zeros(()), torch.zeros(())
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_operator_argument_wanted_and_got(message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        ERRORS[message]()


def test_meta_tensors():
    x = torch.zeros(2, 3, 8, device="meta", dtype=torch.bfloat16)
    y, h = add_rms_norm(x, x, torch.zeros(8, device="meta"))
    assert y.shape == h.shape == x.shape and y.dtype == torch.float32 and y.is_meta
