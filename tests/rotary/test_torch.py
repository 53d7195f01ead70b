"""rotary_embedding in PyTorch, and against transformers' functions."""

import importlib

import pytest
import torch
from torch import nn

import fusedops
from fusedops.functional import rotary_embedding
from fusedops.functional.rotary import rotary_embedding_reference
from fusedops.testing import gradients, yardstick
from rotary.cases import FLOATS, LAYOUTS, inputs, with_table

PAIRS = pytest.mark.parametrize("interleaved", LAYOUTS, ids=["halves", "interleaved"])

# Model: whether its pairs are neighbours, and whether its results go back to q's dtype.
MODELS = {
    "llama": (False, False),
    "gemma": (False, False),
    "gpt_neox": (False, False),
    "phi3": (False, False),
    "olmo2": (False, True),
    "modernbert": (False, True),
    "cohere": (True, True),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("table", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [1, 2])
def test_as_transformers(model, dtype, table, dim):
    interleaved, back = MODELS[model]
    theirs = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    args = inputs((4, 2), 6, 32, 20 if model in ("gpt_neox", "phi3") else 32, dtype, table=table)
    args = [x.transpose(1, 2) if i < 2 and dim == 2 else x for i, x in enumerate(args)]

    def run(args):
        return theirs.apply_rotary_pos_emb(*args, unsqueeze_dim=dim)

    def ours(args):
        found = rotary_embedding(*args, unsqueeze_dim=dim, interleaved=interleaved)
        return [y.to(args[0].dtype) for y in found] if back else found

    eager = run(args)
    exact = rotary_embedding_reference(
        *(a.double() for a in args), unsqueeze_dim=dim, interleaved=interleaved
    )
    for found, expected, wide in zip(ours(args), eager, exact, strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert yardstick(found, expected, wide) is None


@pytest.mark.parametrize("rotary", [32, 20])
@PAIRS
def test_double_backward(rotary, interleaved):
    q, k, cos, sin = inputs((3, 2), 5, 32, rotary)
    draw = torch.Generator().manual_seed(3)
    directions = [torch.randn(x.shape, generator=draw) for x in (q, k)]

    def second(run, to):
        leaves = [x.to(to).requires_grad_() for x in (q, k)]
        outputs = run(*leaves, cos.to(to), sin.to(to), interleaved=interleaved)
        loss = sum((y**3).sum() for y in outputs)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, [d.to(to) for d in directions])

    found, eager = (
        second(run, torch.float32) for run in (rotary_embedding, rotary_embedding_reference)
    )
    exact = second(rotary_embedding_reference, torch.float64)
    for values in zip(found, eager, exact, strict=True):
        assert yardstick(*values) is None


@PAIRS
def test_double_backward_of_a_kernel(interleaved):
    """The gradient of a gradient that the kernels computed, by that gradient's own cotangent."""
    q, k, cos, sin = inputs((3, 2), 5, 12, 8, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k)]
    cotangents = [torch.randn_like(x).requires_grad_() for x in leaves]
    outputs = rotary_embedding(*leaves, cos, sin, interleaved=interleaved)
    first = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True)
    found = torch.autograd.grad(first, cotangents, [torch.ones_like(x) for x in leaves])
    expected = rotary_embedding(
        *(torch.ones_like(x) for x in leaves), cos, sin, interleaved=interleaved
    )
    torch.testing.assert_close(found, expected)


@PAIRS
def test_gradgradcheck(interleaved):
    args = [a.requires_grad_() for a in inputs((2, 1), 2, 6, 4, torch.float64, batch=1)]

    def run(*args):
        return rotary_embedding(*args, interleaved=interleaved)

    assert torch.autograd.gradcheck(run, args) and torch.autograd.gradgradcheck(run, args)


@PAIRS
def test_forward_mode_and_functorch(interleaved):
    q, *rest = inputs((3, 2), 4, 10, 8)
    t = torch.randn_like(q)

    def first(run):
        return lambda q: run(q, *rest, interleaved=interleaved)[0]

    for transform in (
        lambda f: torch.func.jvp(f, (q,), (t,))[1],
        lambda f: torch.func.grad(lambda q: f(q).sin().sum())(q),
        lambda f: torch.func.vmap(f)(torch.stack([q, t])),
        lambda f: torch.func.jacrev(f)(q),
    ):
        expected = transform(first(rotary_embedding_reference))
        torch.testing.assert_close(transform(first(rotary_embedding)), expected)


@pytest.mark.filterwarnings("error:There is a performance drop")
@PAIRS
def test_vmap_sees_through_the_operator(interleaved):
    q, k, cos, sin = inputs((3, 2), 4, 10, 8)
    run = with_table(rotary_embedding, cos[0], sin[0], unsqueeze_dim=0, interleaved=interleaved)
    torch.testing.assert_close(torch.vmap(run)(q, k), run(q, k))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
@PAIRS
def test_composite_rounds_once(dtype, table, interleaved):
    q, k, cos, sin = inputs((3, 2), 20, 64, 48, dtype, table=table)
    how = {"interleaved": interleaved}
    # vmap sees the composite, and differentiates it by ATen's formulas

    def composite(q, k):
        run = with_table(rotary_embedding, cos, sin, **how)
        return tuple(y[0] for y in torch.vmap(run)(q.unsqueeze(0), k.unsqueeze(0)))

    found = gradients(composite, (q, k))
    reference = with_table(rotary_embedding_reference, cos, sin, **how)
    eager, exact = gradients(reference, (q, k)), gradients(reference, (q.double(), k.double()))
    assert all(yardstick(found[key], eager[key], exact[key]) is None for key in found)


@PAIRS
def test_inference_mode_and_no_grad(interleaved):
    args = inputs((3, 2), 5, 33, 20)
    with torch.inference_mode():
        found = rotary_embedding(*args, interleaved=interleaved)
    expected = rotary_embedding_reference(*args, interleaved=interleaved)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        found = rotary_embedding(*(a.requires_grad_() for a in args), interleaved=interleaved)
    assert not any(y.requires_grad for y in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["contiguous", "heads inside"])
@PAIRS
def test_opcheck(dtype, inside, interleaved):
    q, k, cos, sin = inputs((3, 2), 5, 24, 20, dtype)
    if inside:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    args = (q.requires_grad_(), k.requires_grad_(), cos, sin)
    torch.library.opcheck(torch.ops.fusedops.rotary_embedding, args, {"interleaved": interleaved})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [[True, True], [True, False], [False, True]], ids=str)
@PAIRS
def test_opcheck_kernels(dtype, given, interleaved):
    operators = torch.ops.fusedops
    q, k, cos, sin = inputs((3, 2), 5, 24, 20, dtype, table=torch.float32)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(operators.rotary_forward, (q, k, cos, sin, 1, interleaved))
    grads = (x.float() if g else None for x, g in zip((q, k), given, strict=True))
    how = (1, interleaved, dtype)
    torch.library.opcheck(operators.rotary_backward, (*grads, cos, sin, *how))


def test_kernels_refuse_to_be_differentiated():
    q, k, cos, sin = inputs((3, 2), 5, 24)
    found, _ = torch.ops.fusedops.rotary_forward(q.requires_grad_(), k, cos, sin, 1, False)
    with pytest.raises(RuntimeError, match="not implemented"):
        found.sum().backward()


def projected(x, heads, width):
    """As a model has them: heads inside the sequence."""
    return x.view(*x.shape[:-1], heads, width).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@PAIRS
def test_compile_with_dynamic_shapes(dtype, interleaved):
    def step(q, k, cos, sin):
        return rotary_embedding(
            projected(q * 2, 3, 24), projected(k + 1, 2, 24), cos, sin, interleaved=interleaved
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for seq in (3, 5, 8):
        q, k, cos, sin = inputs((3, 2), seq, 24, 16, dtype)
        q, k = (x.transpose(1, 2).flatten(2) for x in (q, k))
        found, expected = (gradients(with_table(run, cos, sin), (q, k)) for run in (compiled, step))
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)


@PAIRS
def test_export_with_dynamic_shapes(interleaved):
    class Module(nn.Module):
        def forward(self, q, k, cos, sin):
            return rotary_embedding(q, k, cos, sin, interleaved=interleaved)

    seq = torch.export.Dim("seq", min=2)
    shapes = ({2: seq}, {2: seq}, {1: seq}, {1: seq})
    program = torch.export.export(Module(), inputs((3, 2), 4, 24), dynamic_shapes=shapes)
    more = inputs((3, 2), 9, 24)
    expected = rotary_embedding(*more, interleaved=interleaved)
    torch.testing.assert_close(program.module()(*more), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotary", [32, 20])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_as_transformers_lines(dtype, table, rotary, device):
    args = inputs((3, 2), 5, 32, rotary, dtype, table=table)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.bfloat16):
        found = rotary_embedding(*args)
        composite = rotary_embedding(*args[:2], args[2].requires_grad_(), args[3])
        expected = rotary_embedding_reference(*args)
    for ours in (found, composite):
        assert [y.dtype for y in ours] == [y.dtype for y in expected]
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.04)


def test_gradients_have_the_dtypes_of_their_tensors():
    q, k, cos, sin = inputs((3, 2), 5, 32, dtype=torch.bfloat16, table=torch.float32)
    leaves = q.requires_grad_(), k.requires_grad_()
    found = rotary_embedding(*leaves, cos, sin)
    grads = torch.autograd.grad(sum(y.sum() for y in found), leaves)
    assert {y.dtype for y in found} == {torch.float32}
    assert {g.dtype for g in grads} == {torch.bfloat16}


def test_checkpointing_and_outputs_that_are_changed_in_place():
    q, k, cos, sin = inputs((3, 2), 5, 32)
    leaves = q.requires_grad_(), k.requires_grad_()
    expected = torch.autograd.grad(
        2 * sum(y.sum() for y in rotary_embedding(*leaves, cos, sin)), leaves
    )
    y, z = torch.utils.checkpoint.checkpoint(
        rotary_embedding, *leaves, cos, sin, use_reentrant=False
    )
    found = torch.autograd.grad(y.mul_(2).sum() + z.mul_(2).sum(), leaves)
    assert all(map(torch.equal, found, expected))


def test_a_changed_table_is_noticed():
    q, k, cos, sin = inputs((3, 2), 5, 32)
    y, _ = rotary_embedding(q.requires_grad_(), k, cos, sin)
    cos.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_changed_heads_are_no_matter():
    """They are not kept."""
    q, k, cos, sin = inputs((3, 2), 5, 32)
    leaf = q.clone().requires_grad_()
    q = leaf * 1
    y, _ = rotary_embedding(q, k, cos, sin)
    q.add_(1)
    assert torch.autograd.grad(y.sum(), leaf)[0].isfinite().all()


def zeros(*shape, **to):
    return torch.zeros(shape, **to)


def call(q=(2, 3, 5, 8), k=(2, 2, 5, 8), cos=(2, 5, 8), sin=None, **how):
    sin = cos if sin is None else sin
    made = [x if isinstance(x, torch.Tensor) else zeros(*x) for x in (q, k, cos, sin)]
    return lambda: rotary_embedding(*made, **how)


backward = torch.ops.fusedops.rotary_backward
ERRORS = {
    r"q must be float32, .*got int64 \[2, 3, 5, 8\]": call(zeros(2, 3, 5, 8, dtype=torch.int64)),
    r"k must be float32, .*got complex64 \[4\]": call(k=zeros(4, dtype=torch.complex64)),
    r"sin must be float32, .*got uint8 \[2, 5, 8\]": call(sin=zeros(2, 5, 8, dtype=torch.uint8)),
    r"cos must have a last dimension of even size, got float32 \[2, 5, 7\]": call(cos=(2, 5, 7)),
    r"cos must have a last dimension of even size, got float32 \[\]": call(cos=()),
    r"sin must have shape \[2, 5, 8\] like cos, got float32 \[2, 5, 6\]": call(sin=(2, 5, 6)),
    r"q must have at least 10 elements .* like cos, got float32 \[2, 3, 5, 8\]": call(
        cos=(2, 5, 10)
    ),
    r"k must have at least 8 elements .* like cos, got float32 \[\]": call(k=()),
    r"k must have at least 8 elements .* got float32 \[2, 2, 5, 6\]": call(k=(2, 2, 5, 6)),
    r"q must broadcast with cos, float32 \[2, 4, 8\] unsqueezed at 1, got .* \[2, 3, 5, 8\]": call(
        cos=(2, 4, 8)
    ),
    r"q must broadcast with cos, float32 \[3, 5, 8\] unsqueezed at 1, got": call(cos=(3, 5, 8)),
    r"q must broadcast with cos, .* unsqueezed at 2, got float32 \[2, 3, 5, 8\]": call(
        unsqueeze_dim=2
    ),
    r"k must broadcast with cos, .* got float32 \[2, 2, 6, 8\]": call(k=(2, 2, 6, 8)),
    r"unsqueeze_dim must be .* float32 \[2, 5, 8\], from -4 to 2 and not -1, got 3": call(
        unsqueeze_dim=3
    ),
    r"unsqueeze_dim must be .* and not -1, got -1$": call(unsqueeze_dim=-1),
    r"unsqueeze_dim must be .* from -4 to 2 .* got -5": call(unsqueeze_dim=-5),
    r"k must be on cpu like cos, got meta": call(k=zeros(2, 2, 5, 8, device="meta")),
    r"sin must be on cpu like cos, got meta": call(sin=zeros(2, 5, 8, device="meta")),
    r"rotary_forward: q .* must be alike but for their heads": lambda: (
        torch.ops.fusedops.rotary_forward(
            zeros(1, 1, 5, 8), zeros(1, 5, 8), zeros(5, 8), zeros(5, 8), 0, False
        )
    ),
    r"rotary_backward: dq or dk must be there, got neither": lambda: backward(
        None, None, zeros(5, 8), zeros(5, 8), 0, False, torch.float32
    ),
    r"rotary_backward: dq and dk must be Float, .* got float16 \[1, 5, 8\]": lambda: backward(
        zeros(1, 5, 8).half(), None, zeros(5, 8), zeros(5, 8), 0, False, torch.float32
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_operator_argument_wanted_and_got(message):
    operator = "rotary_" if message.startswith("rotary") else "rotary_embedding: "
    with pytest.raises((RuntimeError, ValueError), match=message) as raised:
        ERRORS[message]()
    assert str(raised.value).startswith(operator)


def test_meta_tensors():
    args = [a.to("meta") for a in inputs((3, 2), 5, 32, 20, torch.bfloat16, table=torch.float32)]
    args[0] = args[0].transpose(1, 2).contiguous().transpose(1, 2)
    for x, y in zip(args, rotary_embedding(*args), strict=False):
        assert y.shape == x.shape and y.stride() == x.stride()
        assert y.is_meta and y.dtype == torch.float32


class Subclass(torch.Tensor):
    pass


def test_subclasses_and_modes_see_the_operator():
    args = inputs((3, 2), 5, 32)
    found = rotary_embedding(args[0].as_subclass(Subclass), *args[1:])
    assert type(found[0]) is Subclass

    class Module(nn.Module):
        def forward(self, q, k, cos, sin):
            return rotary_embedding(q, k, cos, sin)

    traced = torch.fx.symbolic_trace(Module())
    torch.testing.assert_close(traced(*args), rotary_embedding(*args))
    assert fusedops.functional.rotary_embedding is rotary_embedding
