"""Gradients of every operator under compiled autograd equal those of the eager engine."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from growth.families import OPERATORS, subject_of
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

import fusedops
from contract.family import FAMILIES
from fusedops import functional as ff
from fusedops.testing import yardstick


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


TARGETS = torch.randint(10, (6,), generator=torch.Generator().manual_seed(0))
QUANTIZED = ff.quantize_weight(torch.linspace(-1, 1, 16 * 64).view(16, 64), "int8")
OF_TWO_DIMENSIONS = partial(ff.rms_norm, normalized_shape=(4, 8), offset=1.0)


def chosen(record):
    """Each operator's plainest call and its last, which has most options: they share a node.

    Of attention also dropout, whose mask is drawn again, and sequences of their own lengths.
    """
    calls = record.calls | record.more
    by_operator = {}
    for name, call in calls.items():
        if name not in ("cache", "pages"):  # whose gradients are the definition's
            by_operator.setdefault(call.operator, []).append(name)
    names = {name for group in by_operator.values() for name in (group[0], group[-1])}
    return {n: call for n, call in calls.items() if n in names | {"dropout", "sequences"}}


PAIRS = [
    pytest.param(subject.run, subject.inputs, id=f"{family}-{name}")
    for family, record in FAMILIES.items()
    for name, call in chosen(record).items()
    for subject in [subject_of(call)]
]
IN_FORWARD = OPERATORS["cross_entropy, grad_in_forward"]()
FIRST = [next(p for p in PAIRS if p.id.startswith(f"{family}-")) for family in FAMILIES]
PAIRS.append(pytest.param(IN_FORWARD.run, IN_FORWARD.inputs, id="grad_in_forward"))
PAIRS.append(pytest.param(OF_TWO_DIMENSIONS, lambda: [leaf(3, 4, 8)], id="norm of two dimensions"))


@pytest.fixture
def captures():
    """How often compiled autograd has made a graph."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["compiled_autograd"]["captures"]
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def every_size():
    """Not torch's own lines for small linears."""
    with fusedops.backend("cpu"):
        yield


def engine(compiled):
    if not compiled:
        return contextlib.nullcontext()
    return compiled_autograd._enable(torch.compile(backend="aot_eager"))


def loss_of(function, inputs):
    """A loss of fresh copies of the inputs, and the copies that have gradients. The same inputs
    give the same dropout."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    torch.manual_seed(1)
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in outputs)
    return loss, [t for t in inputs if t.requires_grad]


def gradients(function, inputs, compiled):
    """The gradients that a backward leaves in the inputs."""
    loss, leaves = loss_of(function, inputs)
    with engine(compiled):
        loss.backward()
    return [t.grad for t in leaves]


def penalty_gradients(function, inputs, compiled):
    """The gradients that a loss of gradients leaves in the inputs."""
    loss, leaves = loss_of(
        lambda *given: torch.cat([t.sin().flatten() for t in tree_leaves(function(*given))]), inputs
    )
    with engine(compiled):
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
    assert all(g.requires_grad for g in grads)
    sum(g.square().sum() for g in grads).backward()
    return [t.grad for t in leaves]


def check(function, inputs):
    """Whether both engines leave the same bits."""
    expected = gradients(function, inputs, compiled=False)
    for got, want in zip(gradients(function, inputs, compiled=True), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("function,inputs", PAIRS)
def test_gradients_are_those_of_the_eager_engine(function, inputs, captures):
    for _ in range(2):  # the second runs the graph of the first, on other numbers
        check(function, inputs())
    assert captures() == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_what_has_no_double_backward_says_so(compiled, captures):
    """Under compiled autograd too, where silence would leave a gradient without its own."""

    def without_logits(x):
        return ff.cross_entropy(x, TARGETS, grad_in_forward=True)

    with pytest.raises(RuntimeError, match="grad_in_forward=True keeps no logits"):
        penalty_gradients(without_logits, [leaf(6, 10)], compiled)


@pytest.mark.parametrize("function,inputs", FIRST)
def test_gradients_have_gradients(function, inputs, captures):
    """create_graph=True, as for a gradient penalty."""
    drawn = inputs()
    expected = penalty_gradients(function, drawn, compiled=False)
    actual = penalty_gradients(function, drawn, compiled=True)
    for got, want in zip(actual, expected, strict=True):
        cancelled = 1e-7 * want.abs().max().item()  # experts add numbers of 1e9 in another order
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 + cancelled)
    assert captures() == 1


def test_another_option_is_another_graph(captures):
    for offset in (0.0, 1.0):
        check(partial(ff.rms_norm, normalized_shape=(32,), offset=offset), [leaf(4, 32)])
    assert captures() == 2


def test_sizes_become_symbols(captures):
    for rows in (3, 4, 5, 6):
        check(partial(ff.quantized_linear, qweight=QUANTIZED), [leaf(rows, 64)])
    assert captures() <= 2


def test_saved_tensors_pass_through_hooks(captures):
    def offloaded(x, w):
        with torch.autograd.graph.save_on_cpu():
            return ff.rms_norm(x, (32,), w)

    check(offloaded, [leaf(4, 32), leaf(32)])
    assert captures() == 1


def tiny_llama(layers):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def model_gradients(model, ids, run=lambda step: step):
    """Of a training step, by parameter."""

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    model.zero_grad()
    run(step)()
    return {name.replace(".module", ""): p.grad for name, p in model.named_parameters()}


class Broken(nn.Module):
    """A layer that torch.compile cannot have in the graph of the model around it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_patched_model_with_a_graph_break(backend, captures):
    """In "eager" graphs our nodes do the backward, in "aot_eager" the kernels that they call."""
    model, ids, graphs = tiny_llama(1), torch.randint(64, (2, 16)), []
    eager = model_gradients(copy.deepcopy(model), ids)
    exact = model_gradients(copy.deepcopy(model).double(), ids)

    def recorded(graph, inputs):
        graphs.append(str(graph.graph))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    with (
        fusedops.fuse_always(),
        fusedops.patched(model),
        torch._dynamo.config.patch(compiled_autograd=True),
    ):
        model.model.layers[0] = Broken(model.model.layers[0])
        grads = model_gradients(model, ids, torch.compile(backend=recorded))
    assert len(graphs) > 2 and any("graph_break()" in why for why in counters["graph_break"])
    node = {"eager": "FusedAttentionBackward", "aot_eager": "fusedops.attention_backward"}[backend]
    assert captures() == 1 and node in graphs[-1]
    for name, gradient in grads.items():
        assert yardstick(gradient, eager[name], exact[name]) is None, name
