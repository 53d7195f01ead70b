"""Rotary-embedding benchmarks against Hugging Face code, torch.compile and, on GPUs, Liger.

Memory-bound: the figure that matters is the fraction of copy bandwidth, for the fewest bytes that
must move. A shape is batch, query heads, key heads, positions and head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import (
    FORWARD,
    TRAINING,
    Contender,
    Operation,
    Run,
    compiled,
    find,
    gpu_rows,
    through_dispatcher,
    with_peers,
)
from benchmarks.harness.goals import Goal
from fusedops.references.rotary import rotary_embedding_reference


def tensors(part: float = 1.0, projected: bool = False, interleaved: bool = False) -> Callable:
    """q, k, cos and sin; the fraction `part` of a head is rotated.

    projected: as views of [batch, seq, all heads]. Both angles of a pair are equal, as in every
    model that only rotates positions.
    """

    def inputs(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        batch, heads, kv_heads, seq, width = shape

        def drawn(count: int) -> Tensor:
            if projected:
                x = torch.randn(batch, seq, count, width, dtype=dtype, device=device)
                return x.transpose(1, 2).requires_grad_()
            x = torch.randn(batch, count, seq, width, dtype=dtype, device=device)
            return x.requires_grad_()

        rotary = int(part * width)
        turns = torch.arange(0, rotary, 2, device=device) / rotary
        angle = torch.arange(seq, device=device)[:, None] * 10000**-turns
        angle = angle.repeat_interleave(2, -1) if interleaved else angle.repeat(1, 2)
        cos, sin = angle.cos().to(dtype)[None], angle.sin().to(dtype)[None]
        return drawn(heads), drawn(kv_heads), cos, sin

    return inputs


def traffic(mode: str, *tensors: Tensor) -> int:
    """q and k are read and written, cos and sin are read, in forward and backward."""
    q, k, cos, sin = tensors
    passes = 2 if mode == TRAINING else 1
    return passes * (2 * q.nbytes + 2 * k.nbytes + cos.nbytes + sin.nbytes)


def huggingface(model: str) -> Contender:
    def prepare(*inputs: Tensor) -> Run:
        module = f"transformers.models.{model}.modeling_{model}"
        return partial(find(module, "apply_rotary_pos_emb"), *inputs)

    return Contender(prepare)


def operation(name: str, model: str, interleaved: bool = False, **inputs) -> Operation:
    """Returns a model's function, the same compiled, then ours."""
    lines, options = huggingface(model), {"interleaved": interleaved}
    fused = Contender(lambda *tensors: partial(ours.rotary_embedding, *tensors, **options))
    return Operation(
        name,
        tensors(**inputs, **options),
        partial(rotary_embedding_reference, **options),
        traffic,
        {"huggingface": lines, "compile(huggingface)": compiled(lines), "fusedops": fused},
    )


ROTARY = operation("rotary_embedding", "llama")
PROJECTED = operation("rotary_embedding of projections", "llama", projected=True)
PARTIAL = operation("rotary_embedding of a quarter", "gpt_neox", part=0.25)
INTERLEAVED = operation("rotary_embedding interleaved", "cohere", interleaved=True)
OPERATIONS = [ROTARY, PROJECTED, PARTIAL, INTERLEAVED]

LLAMA_8B = (1, 32, 8, 2048, 128)
SHAPES = [(1, 32, 8, 1, 128), (8, 32, 8, 1, 128), (2, 12, 12, 512, 64), LLAMA_8B]
QUICK_SHAPES = [(1, 32, 8, 1, 128), (2, 12, 12, 512, 64)]

BF16, HF = torch.bfloat16, "huggingface"
MUST_SHOW = [
    Goal(ROTARY, FORWARD, BF16, LLAMA_8B, HF, {"default": 4.0, "keep": 4.0}, 0.6),
    Goal(ROTARY, TRAINING, BF16, LLAMA_8B, HF, {"default": 3.0, "keep": 3.0}),
    Goal(PROJECTED, FORWARD, BF16, LLAMA_8B, HF, {"default": 4.0, "keep": 4.0}),
    Goal(PROJECTED, TRAINING, BF16, LLAMA_8B, HF, {"default": 3.0, "keep": 3.0}),
    Goal(ROTARY, FORWARD, BF16, (1, 32, 8, 1, 128), HF, {"default": 4.0}),
]


# Small-batch calls.

WIDTH = 64  # head width


def token_inputs(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """q and k for that many tokens, with that many elements each."""
    tokens, hidden = shape
    heads = hidden // WIDTH
    return ROTARY.inputs((1, heads, heads, tokens, WIDTH), dtype, device)


CALLS = {
    "huggingface": ROTARY.contenders["huggingface"],
    "fusedops torch.ops": through_dispatcher("rotary_embedding"),
    "fusedops functional": ROTARY.contenders["fusedops"],
}
LAUNCH = [replace(ROTARY, inputs=token_inputs, contenders=CALLS)]


# Rows on a GPU.


def liger(*inputs: Tensor) -> Run:
    """Liger rotates in place, and needs heads inside the sequence.

    For the other layout it makes copies, which are part of its time.
    """
    return partial(find("liger_kernel.ops.rope", "LigerRopeFunction").apply, *inputs)


LARGE_SHAPES = ((8, 32, 8, 2048, 128), (4, 32, 32, 4096, 64))
SMALL_SHAPES = ((1, 32, 8, 1, 128), (16, 32, 8, 1, 128), (64, 32, 8, 1, 128))
EVERY = [with_peers(ROTARY, {"liger": Contender(liger)}), PROJECTED, PARTIAL, INTERLEAVED]
GPU_ROWS = gpu_rows(EVERY, LARGE_SHAPES, SMALL_SHAPES)
