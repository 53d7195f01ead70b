"""Mixture-of-experts benchmarks against transformers' eager, grouped_mm and batched_mm.

A shape is (tokens, experts, choices, hidden, inner). With few tokens, reading the chosen experts'
weights is the limit. With many, the matmuls are. batched_mm copies an expert's weights for each
choice, so its rows end where that takes gigabytes.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import (
    FORWARD,
    TRAINING,
    Contender,
    Operation,
    Skip,
    calling,
    find,
    gpu_row,
    through_dispatcher,
)
from benchmarks.harness.goals import Goal
from fusedops.references.experts import experts_reference

QWEN = (64, 8, 1024, 512)  # a block of Qwen3-MoE: experts, choices, hidden, inner
SHAPES = [(tokens, *QWEN) for tokens in (1, 8, 32, 64, 512)]
QUICK_SHAPES = [(1, 8, 2, 256, 128), (64, 8, 2, 256, 128)]
MOST_COPIED = 1 << 30  # bytes of weights that batched_mm may copy


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    tokens, experts, k, hidden, inner = shape

    def weight(*size: int) -> Parameter:
        return Parameter(torch.randn(*size, dtype=dtype, device=device) / size[-1] ** 0.5)

    x = torch.randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    index = torch.rand(tokens, experts, device=device).argsort(1)[:, :k].contiguous()
    weights = torch.rand(tokens, k, device=device).softmax(1).to(dtype).requires_grad_()
    return x, index, weights, weight(experts, 2 * inner, hidden), weight(experts, hidden, inner)


def bytes_moved(
    mode: str, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> int:
    """Forward reads x and the chosen experts, and writes y; backward writes all gradients too."""
    experts = gate_up.nbytes + down.nbytes
    chosen = experts * index.unique().numel() // len(gate_up)
    forward = 2 * x.nbytes + index.nbytes + weights.nbytes + chosen
    return forward if mode == FORWARD else 2 * forward + x.nbytes + experts


def flops(
    mode: str, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> int:
    of_one = gate_up[0].numel() + down[0].numel()
    return 2 * index.numel() * of_one * (1 if mode == FORWARD else 3)


def _module(gate_up: Tensor, down: Tensor) -> Any:
    """What transformers' functions read of an experts module."""
    gate = find("transformers.integrations.moe", "_default_apply_gate")
    module = SimpleNamespace(
        gate_up_proj=gate_up,
        down_proj=down,
        num_experts=len(gate_up),
        act_fn=torch.nn.functional.silu,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
    )
    module._apply_gate = partial(gate, module)
    return module


def _run(function: Callable, x, index, weights, gate_up, down) -> Tensor:
    return function(_module(gate_up, down), x, index, weights)


def theirs(name: str) -> Contender:
    """One of transformers' implementations, whose results are not checked."""

    def prepare(*tensors: Tensor):
        if name == "eager":
            home = "transformers.models.qwen3_moe.modeling_qwen3_moe"
            function = inspect.unwrap(find(home, "Qwen3MoeExperts").forward)
        else:
            function = find("transformers.integrations.moe", f"{name}_experts_forward")
        _, index, _, gate_up, down = tensors
        copied = index.numel() * (gate_up[0].nbytes + down[0].nbytes)
        if name == "batched_mm" and copied > MOST_COPIED:
            raise Skip(f"it would copy {copied >> 20} MiB of weights")
        return partial(_run, function, *tensors)

    return Contender(prepare, checked=False)


def by_expert(result: Tensor) -> Tensor:
    """An expert's gradient as one row: of few tokens, each of its own has one number's error."""
    return result.detach().flatten(1) if result.dim() == 3 else result.detach()


THEIRS = {name: theirs(name) for name in ("eager", "grouped_mm", "batched_mm")}
EXPERTS = Operation(
    "experts",
    inputs,
    experts_reference,
    bytes_moved,
    THEIRS | {"fusedops": calling(ours.experts)},
    flops,
    by_expert,
)


def codes_of(gate_up: Tensor, down: Tensor) -> list[ours.QuantizedWeight]:
    return [ours.quantize_experts(weight.detach(), "nf4") for weight in (gate_up, down)]


def of_codes(x: Tensor, index: Tensor, weights: Tensor, *floats: Tensor) -> Tensor:
    return experts_reference(x, index, weights, *codes_of(*floats))


def fused_of_codes(x: Tensor, index: Tensor, weights: Tensor, *floats: Tensor):
    return partial(ours.experts, x, index, weights, *codes_of(*floats))


def bytes_of_codes(mode: str, *tensors: Tensor) -> int:
    """nf4 takes 4 bits and a float32 for each 64 numbers."""
    *rest, gate_up, down = tensors
    codes = [
        torch.empty(len(w), w[0].numel() * 9 // 16, dtype=torch.uint8) for w in (gate_up, down)
    ]
    return bytes_moved(mode, *rest, *codes)


QUANTIZED = Operation(
    "experts, nf4",
    inputs,
    of_codes,
    bytes_of_codes,
    # transformers has no quantized experts: theirs multiply the floats
    THEIRS | {"fusedops": Contender(fused_of_codes)},
    flops,
)
OPERATIONS = [EXPERTS, QUANTIZED]


def launch() -> Operation:
    """Returns every way to call it: eager, torch.ops, the short path, the module."""

    def small(shape: Sequence[int], dtype: torch.dtype, device: torch.device):
        tokens, hidden = shape
        return inputs((tokens, 8, 4, hidden, hidden), dtype, device)

    def through_module(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor):
        module = fusedops.nn.Experts(*down.shape, device="meta")
        module.gate_up_proj, module.down_proj = gate_up, down
        return partial(module, x, index, weights)

    rows = {
        "eager": EXPERTS.contenders["eager"],
        "fusedops torch.ops": through_dispatcher("experts"),
        "fusedops functional": EXPERTS.contenders["fusedops"],
        "fusedops module": Contender(through_module),
    }
    return replace(EXPERTS, inputs=small, contenders=rows)


LAUNCH = [launch()]

F32, BF16 = torch.float32, torch.bfloat16
AT_LEAST = {  # tokens: over the fastest of transformers', in float32 and bfloat16
    1: (1.7, 2.3),
    8: (1.4, 1.6),
    32: (2.2, 2.1),
    64: (2.8, 2.5),
    512: (2.2, 1.5),
}
MUST_SHOW = [
    Goal(EXPERTS, FORWARD, dtype, (tokens, *QWEN), over, {"default": at_least[dtype == BF16]})
    for tokens, at_least in AT_LEAST.items()
    for dtype in (F32, BF16)
    for over in ("eager", "grouped_mm", *(["batched_mm"] if tokens <= 8 else []))
]
# Not over eager: its gradient of each expert is as large as the weights of all, 20 times slower.
MUST_SHOW += [Goal(EXPERTS, TRAINING, F32, (256, *QWEN), "grouped_mm", {"default": 1.5})]
MUST_SHOW += [
    Goal(QUANTIZED, FORWARD, BF16, (tokens, *QWEN), over, {"default": at_least})
    for tokens, at_least in ((1, 4.0), (8, 3.0))
    for over in ("eager", "grouped_mm", "batched_mm")
]

GPU_ROWS = [gpu_row(EXPERTS, FORWARD, (tokens, *QWEN), "device") for tokens in (1, 16, 512, 4096)]
