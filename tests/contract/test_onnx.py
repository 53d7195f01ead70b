"""torch.onnx.export(dynamo=False): operators are exported as ONNX's own operators."""

import dataclasses
import io
from functools import partial

import pytest
import torch
from axes import grid
from calling import Calls
from torch import nn

import fusedops
from fusedops import functional as F

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
N = 32


def exported(module, *inputs, opset=17):
    """The exported module's results in onnxruntime, which has none of our operators."""
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=False, opset_version=opset)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [node.name for node in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, given)]


def check(module, *inputs, opset=17):
    with torch.no_grad():
        expected = module.eval()(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = tuple(exported(module, *inputs, opset=opset))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def quantized(format, input_format=None):
    """Operands are float32, as in ONNX; by itself the kernel may take bfloat16's products."""
    options = {"input_format": input_format, "compute": "exact"}
    return fusedops.nn.QuantizedLinear.from_linear(nn.Linear(N, N), format, **options)


class Dequantize(nn.Module):
    """Multiplies with a weight whose codes are buffers."""

    def __init__(self, format):
        super().__init__()
        self.weight = F.quantize_weight(torch.randn(N, N), format)
        self.register_buffer("qweight", self.weight.qweight)

    def forward(self, x):
        return x @ F.dequantize_weight(dataclasses.replace(self.weight, qweight=self.qweight))


class Quantize(nn.Module):
    """Quantizes a parameter at each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N))

    def forward(self, x):
        return F.quantized_linear(x, F.quantize_weight(self.weight, "int8"), compute="exact")


def rotary(x):
    q, k = x.view(2, 4, 4, N).chunk(2, 1)
    cos, sin = torch.linspace(0, 1, 4 * N).view(1, 4, N).cos(), torch.ones(1, 4, N)
    return torch.cat(F.rotary_embedding(q, k, cos, sin), 1)


MODULES = {
    "RMSNorm": lambda: fusedops.nn.RMSNorm(N),
    "SwiGLU": lambda: fusedops.nn.SwiGLU(),
    "Linear, gelu": lambda: fusedops.nn.Linear(N, 16, activation="gelu"),
    "QuantizedLinear, int8": lambda: quantized("int8"),
    "QuantizedLinear, fp8": lambda: quantized("fp8"),
    "QuantizedLinear, int8 inputs": lambda: quantized("int8", "int8"),
    "dequantize_weight": lambda: Dequantize("int8"),
    "quantize_weight": lambda: Quantize(),
    "rotary_embedding": lambda: Calls(rotary),
    "add_rms_norm": lambda: Calls(lambda x: F.add_rms_norm(x, x * 2)[0]),
    "add_layer_norm": lambda: Calls(lambda x: F.add_layer_norm(x, x * 2)[1]),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    check(MODULES[name](), torch.randn(2, 4, 4, N))


@pytest.mark.parametrize("module", [fusedops.nn.AddLayerNorm, fusedops.nn.AddRMSNorm])
def test_modules_of_sums(module):
    check(module(N), *torch.randn(2, 4, N))


@grid(format=["int4", "nf4"], module=[quantized, Dequantize])
def test_weights_of_4_bits_need_opset_18(module, format):
    x = torch.randn(4, N)
    check(module(format), x, opset=18)
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="bitwise_and"):
        exported(module(format), x)


LENGTHS = torch.tensor([0, 3, 11, 16])
SEEN = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.3
SEEN[0, 0, 2] = False  # a query without keys
ATTENTIONS = {
    "plain": {},
    "window": {"window": (2, 1)},
    "bool mask": {"bias": SEEN},
    "float mask": {"bias": SEEN.float() * 3},
}
ATTENTIONS["all"] = {"causal": True, "window": (5, 0), "softcap": 2.0, "bias": SEEN}
ATTENTIONS["all"] |= {"sinks": torch.linspace(-1, 1, 4)}


@pytest.mark.parametrize("options", ATTENTIONS)
def test_attention(options):
    check(Calls(partial(F.attention, **ATTENTIONS[options])), *torch.randn(3, 2, 4, 8, 16))


def test_attention_of_grouped_heads_and_its_lse():
    q, (k, v) = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 2, 8, 16)
    check(Calls(partial(F.attention, return_lse=True)), q, k, v)


def test_attention_of_sequences():
    """Lengths may be constants or inputs of the graph."""
    lengths = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}
    qkv = torch.randn(3, 16, 4, 16)
    check(Calls(partial(F.attention, causal=True, **lengths)), *qkv)
    given = Calls(lambda q, k, v, cu: F.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu))
    check(given, *qkv, LENGTHS)


def test_scaled_dot_product_attention():
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    check(Calls(partial(F.scaled_dot_product_attention, is_causal=True)), q, k, v)
    check(Calls(F.scaled_dot_product_attention), q, k, v, SEEN)


def self_attention(**masks):
    attend = fusedops.nn.MultiheadAttention(N, 4, batch_first=True)
    return Calls(lambda x: attend(x, x, x, need_weights=False, **masks)[0], attend=attend)


TRIANGLE = nn.Transformer.generate_square_subsequent_mask(8)
MASKS = {
    "attn_mask": {"attn_mask": SEEN[1, 0].logical_not().fill_diagonal_(False)},
    "is_causal": {"attn_mask": TRIANGLE, "is_causal": True},
    "key_padding_mask": {"key_padding_mask": torch.arange(8).expand(2, 8) > 5},
}


@pytest.mark.parametrize("masks", MASKS)
def test_multihead_attention(masks):
    check(self_attention(**MASKS[masks]), torch.randn(2, 8, N))


def linear_loss(**options):
    """linear_cross_entropy with a head of its own."""
    head = nn.Linear(N, 10)

    def loss(x, target):
        return F.linear_cross_entropy(x, head.weight, target, linear_bias=head.bias, **options)

    return Calls(loss, head=head)


def log_probs(**options):
    """linear_log_probs with a head of its own."""
    head = nn.Linear(N, 10)

    def run(x, target):
        return F.linear_log_probs(x, head.weight, target, linear_bias=head.bias, **options)

    return Calls(run, head=head)


MODIFIED = {"z_loss": 0.1, "softcap": 3.0, "scale": 0.5, "reduction": "sum"}
LOSSES = {
    "cross_entropy, none": lambda: Calls(partial(F.cross_entropy, reduction="none")),
    "cross_entropy, modified": lambda: Calls(partial(F.cross_entropy, **MODIFIED)),
    "linear_cross_entropy, modified": lambda: linear_loss(**MODIFIED),
    "linear_log_probs, all": lambda: log_probs(
        return_entropy=True, return_top1=True, softcap=3.0, temperature=0.7
    ),
    "CrossEntropyLoss, weight": lambda: fusedops.nn.CrossEntropyLoss(torch.linspace(0.5, 1, N)),
    "LinearCrossEntropyLoss": lambda: fusedops.nn.LinearCrossEntropyLoss(N, 10, ignore_index=-100),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    target = torch.randint(10, (12,))
    target[3] = -100
    check(LOSSES[name](), torch.randn(12, N), target)


SMOOTHED = Calls(partial(F.cross_entropy, label_smoothing=0.1))
# What docs/reference/support.md excludes: name -> (module, more inputs, what the error says).
REFUSED = {
    "label_smoothing": (SMOOTHED, [torch.zeros(12, dtype=torch.long)], "label_smoothing"),
    "probabilities": (Calls(F.cross_entropy), [torch.rand(12, N)], "SoftmaxCrossEntropyLoss"),
    "fp8 inputs": (quantized("fp8", "fp8"), [], "JitScalarType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_page_excludes(name):
    module, inputs, said = REFUSED[name]
    with pytest.raises(Exception, match=said):  # torch's or onnxruntime's
        exported(module, torch.randn(12, N), *inputs)


def by_position(model, names):
    """A model of transformers whose inputs are tensors by position. Returns its outputs."""

    def run(*inputs):
        outputs = model(**dict(zip(names, inputs, strict=True)), use_cache=False)
        return tuple(t for t in (outputs.get("loss"), outputs.logits) if t is not None)

    return Calls(run, model=model)


KINDS = {
    "llama": {"norm", "residual", "linear", "attention", "mlp", "rotary", "loss"},
    "t5": {"norm", "linear", "attention"},
}


@pytest.mark.parametrize("name", KINDS)
def test_patched_models(name):
    pytest.importorskip("transformers")
    from patching.models.attention_models import batch, build

    model, given = build(name), batch(name, "right")
    if name == "llama":
        given["labels"] = given["input_ids"]
    outputs = by_position(model, list(given))
    with torch.no_grad():
        expected = outputs(*given.values())
    with fusedops.fuse_always():
        report = fusedops.patch(model)
        actual = exported(outputs, *given.values())
    assert KINDS[name] <= {site.kind for site in report.fused}
    torch.testing.assert_close(tuple(actual), expected, rtol=1e-4, atol=1e-5)


def test_after_an_export_the_kernels_run_again():
    layer, x = fusedops.nn.LayerNorm(N), torch.randn(4, N, requires_grad=True)
    before = layer(x).grad_fn.name()
    exported(layer, x.detach())
    assert layer(x).grad_fn.name() == before
