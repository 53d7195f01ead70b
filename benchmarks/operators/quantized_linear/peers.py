"""Other libraries' quantized linears as benchmark contenders; missing ones are skipped.

bitsandbytes has nf4 with the same bytes as ours: a Linear4bit in eval mode, which packs itself in
its first call without gradients. torchao has int8 with its own codes; its code is compiled, as its
documentation recommends.
"""

import os
import shutil
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.case import Contender, Run, Skip, find


def bitsandbytes(x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    n, k = weight.shape
    form = {"quant_type": "nf4", "compress_statistics": False}
    layer = find("bitsandbytes.nn", "Linear4bit")(k, n, device="meta", **form)
    held = find("bitsandbytes.nn", "Params4bit")(weight, requires_grad=False, **form)
    layer.weight = held.to(weight.device)  # this quantizes it
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return partial(of_layer, x, layer.eval())


def of_layer(x: Tensor, layer: torch.nn.Module) -> Tensor:
    """It packs itself if x requires no gradient; under no_grad it still checks x."""
    return layer(x if torch.is_grad_enabled() else x.detach())


def torchao(config: str, x: Tensor, weight: Tensor, bias: Tensor, *codes: Tensor) -> Run:
    options = find("torchao.quantization", config)
    quantize = find("torchao.quantization", "quantize_")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Skip(f"torchao is compiled: it needs a C++ compiler, {compiler} was not found")
    layer = torch.nn.Linear(*reversed(weight.shape), device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize(layer, options())
    torch.compiler.reset()
    return partial(torch.compile(F.linear, dynamic=False), x, layer.weight.detach(), bias)


PEERS = {
    "nf4": {"bitsandbytes": Contender(bitsandbytes)},
    "int8": {"compile(torchao)": Contender(partial(torchao, "Int8WeightOnlyConfig"))},
    "int8, int8 inputs": {
        "compile(torchao)": Contender(partial(torchao, "Int8DynamicActivationInt8WeightConfig"))
    },
}


def of(kind: str) -> dict[str, Contender]:
    return PEERS.get(kind, {})
