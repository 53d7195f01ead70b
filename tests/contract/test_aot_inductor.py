"""AOTInductor packages give the modules' results, with our operators or torch's."""

import json
import zipfile
from collections import Counter

import torch
from torch import nn

import fusedops
from fusedops import functional as F

N = 64


def packaged(module, x, path):
    with torch.no_grad():
        exported = torch.export.export(module, (x,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        return torch._inductor.aoti_load_package(package)


def kernels(path):
    """How often a package calls each of our kernels."""
    with zipfile.ZipFile(path) as package:
        tables = [package.read(n) for n in package.namelist() if n.endswith(".wrapper.json")]
    calls = (call["node"]["target"] for table in tables for call in json.loads(table)["nodes"])
    return Counter(target.removeprefix("fusedops::").removesuffix("_forward") for target in calls)


class Operators(nn.Module):
    """The functions that always return tensors, as AOTInductor requires."""

    def forward(self, x):
        q = x.view(2, 8, 4, 16).transpose(1, 2)
        cos, sin = x[:1, :, :16].cos(), x[:1, :, :16].sin()
        q, k = F.rotary_embedding(q, q, cos, sin)
        out = F.attention(q, k, k, causal=True).transpose(1, 2).reshape(x.shape)
        out, total = F.add_rms_norm(out, x)
        gated = F.swiglu(torch.cat([out, total], -1))
        out, total = F.add_layer_norm(gated, x)
        return F.geglu(out, total)


class Layers(nn.Module):
    """The functions that return a tensor for the backward, or none without gradients."""

    def __init__(self):
        super().__init__()
        self.norm = fusedops.nn.RMSNorm(N)
        self.up = fusedops.nn.Linear(N, N, activation="gelu")
        self.down = fusedops.nn.QuantizedLinear.from_linear(nn.Linear(N, N), "int4")
        self.loss = fusedops.nn.LinearCrossEntropyLoss(N, N)

    def forward(self, x):
        out = self.down(self.up(self.norm(x)))
        return self.loss(out.flatten(0, 1), torch.arange(16))


def test_operators_in_a_package(tmp_path):
    module, x = Operators(), torch.randn(2, 8, N)
    run = packaged(module, x, tmp_path / "operators.pt2")
    torch.testing.assert_close(run(x), module(x))
    called = {"rotary": 1, "attention": 1, "norm": 2, "gated_activation": 2}
    assert kernels(tmp_path / "operators.pt2") == called


def test_the_reference_in_a_package(tmp_path):
    """AOTInductor has no word for an output that is sometimes absent, so torch's lines run."""
    module, x = Layers().eval(), torch.randn(2, 8, N)
    with fusedops.backend("reference"):
        run = packaged(module, x, tmp_path / "reference.pt2")
        expected = module(x)
    torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)
