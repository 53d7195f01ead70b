"""torch.onnx.export(dynamo=False): operators are traced as composites, of ONNX's own operators."""

import io

import pytest
import torch
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


def exported(module, *inputs):
    """What onnxruntime, which knows no operator of ours, makes of the exported module."""
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=False, opset_version=17)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [node.name for node in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, given)]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def quantized(format):
    """Operands are float32, as in ONNX; by itself the kernel may take bfloat16's products."""
    layer = nn.Linear(N, N)
    return fusedops.nn.QuantizedLinear.from_linear(layer, format, compute="exact")


def attention(x):
    q, k, v = (x.roll(i, 1).view(2, 4, 8, 16) for i in range(3))
    return F.attention(q, k, v, causal=True)


def rotary(x):
    q, k = x.view(2, 4, 4, N).chunk(2, 1)
    cos, sin = torch.linspace(0, 1, 4 * N).view(1, 4, N).cos(), torch.ones(1, 4, N)
    return torch.cat(F.rotary_embedding(q, k, cos, sin), 1)


MODULES = {
    "LayerNorm": lambda: fusedops.nn.LayerNorm(N),
    "RMSNorm": lambda: fusedops.nn.RMSNorm(N),
    "SwiGLU": lambda: fusedops.nn.SwiGLU(),
    "GEGLU": lambda: fusedops.nn.GEGLU(),
    "Linear": lambda: fusedops.nn.Linear(N, 16),
    "Linear, gelu": lambda: fusedops.nn.Linear(N, 16, activation="gelu"),
    "Linear, silu": lambda: fusedops.nn.Linear(N, 16, activation="silu"),
    "QuantizedLinear, int8": lambda: quantized("int8"),
    "attention": lambda: Calls(attention),
    "rotary_embedding": lambda: Calls(rotary),
    "add_rms_norm": lambda: Calls(lambda x: F.add_rms_norm(x, x * 2)[0]),
    "add_layer_norm": lambda: Calls(lambda x: F.add_layer_norm(x, x * 2)[1]),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 4, 4, N)
    with torch.no_grad():
        wanted = module(x)
    torch.testing.assert_close(exported(module, x)[0], wanted, rtol=1e-4, atol=1e-5)


class Hidden(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def test_a_patched_bert():
    transformers = pytest.importorskip("transformers")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config = transformers.BertConfig(hidden_size=N, intermediate_size=64, **heads)
    model = transformers.BertModel(config).eval()
    ids, mask = torch.randint(64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    with torch.no_grad():
        wanted = Hidden(model)(ids, mask)
    with fusedops.fuse_always():
        report = fusedops.patch(model)
        found = exported(Hidden(model), ids, mask)[0]
    assert {"norm", "residual", "linear", "attention"} <= report.coverage.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_after_an_export_the_kernels_run_again():
    layer, x = fusedops.nn.LayerNorm(N), torch.randn(4, N, requires_grad=True)
    before = layer(x).grad_fn.name()
    exported(layer, x.detach())
    assert layer(x).grad_fn.name() == before
