"""The quick tests, `pytest -m quick`: small calls of every operator, AdamW, patch and quantize.

They show that an installed package works with the torch and transformers beside it. They need
pytest and torch, and skip what needs transformers where it is missing.
"""

import io
from importlib.util import find_spec

import pytest
import torch
from growth.families import OPERATORS
from torch import nn

import fusedops
from fusedops import backends
from fusedops.functional import (
    attention,
    cross_entropy,
    geglu,
    linear,
    linear_cross_entropy,
    norm,
    quantize_weight,
    quantized_linear,
    rotary_embedding,
    swiglu,
)
from fusedops.references import gated_activation as gated
from fusedops.references import norm as norms
from fusedops.references.attention import attention_reference
from fusedops.references.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy_reference,
)
from fusedops.references.linear import linear_reference
from fusedops.references.quantized_linear import quantized_linear_reference
from fusedops.references.rotary import rotary_embedding_reference
from fusedops.testing import gradients, poisoned

pytestmark = pytest.mark.quick
WIDTH = 48
FORMATS = ("int8", "int4", "nf4", "fp8")


RANDOM = torch.Generator().manual_seed(12)


def draw(*shape):
    """Returns random values of magnitude 1."""
    return torch.randn(shape, generator=RANDOM)


TARGET = torch.arange(7) % 5
X, RESIDUAL, WEIGHT, BIAS = draw(7, WIDTH), draw(WIDTH, 7).t(), draw(WIDTH), draw(WIDTH)
MATRIX = draw(33, WIDTH) / WIDTH**0.5
HEADS = draw(2, 4, 9, 16), draw(2, 2, 9, 16), draw(2, 2, 9, 16)
TABLES = draw(1, 9, 16).cos(), draw(1, 9, 16).sin()

# Operator: the function, its reference, the arguments and the keywords.
CALLS = {
    "layer_norm": (norm.layer_norm, norms.layer_norm_reference, (X, [WIDTH], WEIGHT, BIAS), {}),
    "rms_norm": (norm.rms_norm, norms.rms_norm_reference, (X, [WIDTH], WEIGHT, 1e-6), {}),
    "add_layer_norm": (
        norm.add_layer_norm,
        norms.add_layer_norm_reference,
        (X, RESIDUAL, WEIGHT, BIAS),
        {},
    ),
    "add_rms_norm": (
        norm.add_rms_norm,
        norms.add_rms_norm_reference,
        (X, RESIDUAL, WEIGHT, 1e-6),
        {},
    ),
    "swiglu": (swiglu, gated.swiglu_reference, (X, RESIDUAL), {}),
    "geglu": (geglu, gated.geglu_reference, (X, RESIDUAL), {}),
    "linear": (linear, linear_reference, (X, MATRIX, draw(33)), {"activation": "gelu"}),
    "rotary_embedding": (
        rotary_embedding,
        rotary_embedding_reference,
        (*HEADS[:2], *TABLES),
        {},
    ),
    "cross_entropy": (cross_entropy, cross_entropy_reference, (X, TARGET), {}),
    "linear_cross_entropy": (
        linear_cross_entropy,
        linear_cross_entropy_reference,
        (X, MATRIX, TARGET),
        {},
    ),
    "attention": (
        attention,
        lambda *args, **kwargs: attention_reference(*args, **kwargs)[0],
        HEADS,
        {"causal": True},
    ),
}


def by_reference(function):
    def run(*args):
        with fusedops.backend("reference"):
            return function(*args)

    return run


# The others, but for those with tests of their own below: the subjects of their growth tests.
OWN = {"quantized_linear", *backends.FAMILIES["adamw"]}
for op in [op for ops in backends.FAMILIES.values() for op in ops]:
    if op not in CALLS and op not in OWN:
        subject = OPERATORS[op]()
        CALLS[op] = subject.run, by_reference(subject.run), tuple(subject.inputs()), {}


def compare(function, reference, args, **kwargs):
    """Outputs and gradients are about as close to float64's as the reference in their dtype.

    The families' own tests are stricter, and run where the torch is known.
    """
    with poisoned():
        actual = gradients(function, args, **kwargs)
    eager = gradients(reference, args, **kwargs)
    wide = tuple(cast(a, torch.float64) for a in args)
    exact = gradients(reference, wide, **kwargs)
    assert actual.keys() == eager.keys()
    for name, result in actual.items():
        assert (result.dtype, result.shape) == (eager[name].dtype, eager[name].shape), name
        error, allowed = ((t - exact[name]).abs().max() for t in (result, eager[name]))
        rounding = torch.finfo(result.dtype).eps * exact[name].abs().max()
        assert error <= 4 * allowed + 2 * rounding, f"{name} is {error:.2e} off"


def cast(value, dtype):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_forward_and_gradients(op, dtype):
    function, reference, args, kwargs = CALLS[op]
    compare(function, reference, tuple(cast(a, dtype) for a in args), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_linear(format, dtype):
    weight = quantize_weight(MATRIX, format)
    parts = weight.qweight, weight.scales, weight.zeros
    sizes = weight.format, weight.out_features, weight.in_features, weight.group_size

    def reference(x, bias):
        return quantized_linear_reference(x, *parts, bias, *sizes)

    args = X.to(dtype), draw(33).to(dtype)
    compare(lambda x, bias: quantized_linear(x, weight, bias), reference, args)


def test_one_family_compiles():
    def step(x, residual):
        return fusedops.functional.add_rms_norm(x, residual, WEIGHT, 1e-6)

    compiled = gradients(torch.compile(step, fullgraph=True), (X, RESIDUAL))
    torch.testing.assert_close(compiled, gradients(step, (X, RESIDUAL)))


class Block(nn.Module):
    """A residual MLP with a norm, built from torch.nn's modules."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.act = nn.GELU()

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def trained(model, optimizer, steps=3):
    """Returns the losses of some training steps towards zero."""
    losses = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_patched_torch_model():
    model = Block()
    expected = gradients(model, (X,))
    report = fusedops.patch(model)
    assert report.coverage["norm"] == (1, 1)
    torch.testing.assert_close(gradients(model, (X,)), expected)
    fusedops.unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in Block().modules()]


def test_adamw_is_torchs():
    ours, theirs = Block(), Block()
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 1e-2, "weight_decay": 0.1}
    losses = trained(ours, fusedops.optim.AdamW(ours.parameters(), **options))
    expected = trained(theirs, torch.optim.AdamW(theirs.parameters(), **options))
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_bit_adamw_goes_on_from_a_checkpoint(dtype):
    model = Block().to(dtype)
    model.register_forward_pre_hook(lambda _, args: tuple(a.to(dtype) for a in args))
    new = {"lr": 1e-2, "min_8bit_size": 1}
    optimizer = fusedops.optim.AdamW8bit(model.parameters(), **new)
    losses = trained(model, optimizer)
    assert losses[-1] < losses[0]
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = trained(model, optimizer)
    weights, states = torch.load(io.BytesIO(file.getvalue()))
    model.load_state_dict(weights)
    again = fusedops.optim.AdamW8bit(model.parameters(), **new)
    again.load_state_dict(states)
    assert trained(model, again) == expected


def test_gradients_are_clipped():
    model = Block()
    model(X).sum().backward()
    fusedops.clip_grad_norm_(model.parameters(), 1.0)
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    torch.testing.assert_close(norms.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantized_model(format):
    model = Block().eval()
    expected = model(X)
    fusedops.quantize(model, format)
    assert isinstance(model.up, fusedops.nn.QuantizedLinear)
    error = (model(X) - expected).norm() / (expected - X).norm()
    assert error < (0.03 if format == "int8" else 0.15)


def test_the_report_names_torch_and_every_operator():
    report = fusedops.env_report()
    assert torch.__version__.partition("+")[0] in report
    assert all(op in report for ops in backends.FAMILIES.values() for op in ops)


def test_a_patched_llama():
    if find_spec("transformers") is None:  # one that does not import fails
        pytest.skip("transformers is not installed")
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(18).view(2, 9)
    before, expected = gradients_of(model, ids)
    report = fusedops.patch(model)
    assert {site.kind for site in report.fused} >= {"norm", "mlp", "loss"}
    after, grads = gradients_of(model, ids)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    fusedops.unpatch(model)
    assert torch.equal(gradients_of(model, ids)[0], before)


def gradients_of(model, ids):
    """Returns a training step's loss and each parameter's gradient."""
    loss = model(input_ids=ids, labels=ids).loss
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
