"""Packages of AOTInductor give what the modules give, by our operators or by torch's."""

import torch
from torch import nn

import fusedops
from fusedops import functional as F

N = 64


def packaged(module, x, path):
    with torch.no_grad():
        exported = torch.export.export(module, (x,))
        made = torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        return torch._inductor.aoti_load_package(made)


class Operators(nn.Module):
    """Those whose outputs are tensors in every call, which AOTInductor asks for."""

    def forward(self, x):
        q = x.view(2, 8, 4, 16).transpose(1, 2)
        cos, sin = x[:1, :, :16].cos(), x[:1, :, :16].sin()
        q, k = F.rotary_embedding(q, q, cos, sin)
        out = F.attention(q, k, k, causal=True).transpose(1, 2).reshape(x.shape)
        out, total = F.add_rms_norm(out, x)
        return F.swiglu(torch.cat([out, total], -1))


class Layers(nn.Module):
    """Those that return a tensor for the backward, or none where nothing has gradients."""

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


def test_the_reference_in_a_package(tmp_path):
    """AOTInductor has no word for an output that is sometimes absent, so torch's lines run."""
    module, x = Layers().eval(), torch.randn(2, 8, N)
    with fusedops.backend("reference"):
        run = packaged(module, x, tmp_path / "reference.pt2")
        wanted = module(x)
    torch.testing.assert_close(run(x), wanted, rtol=1e-4, atol=1e-5)
