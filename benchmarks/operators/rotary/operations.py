"""The rotary embedding's benchmark contenders: Hugging Face, torch.compile and fusedops."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import TRAINING, Contender, Operation, Run, compiled, find
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

        def made(count: int) -> Tensor:
            if projected:
                x = torch.randn(batch, seq, count, width, dtype=dtype, device=device)
                return x.transpose(1, 2).requires_grad_()
            x = torch.randn(batch, count, seq, width, dtype=dtype, device=device)
            return x.requires_grad_()

        rotary = int(part * width)
        turns = torch.arange(0, rotary, 2, device=device) / rotary
        angle = torch.arange(seq, device=device)[:, None] * 10000**-turns
        angle = angle.repeat_interleave(2, -1) if interleaved else angle.repeat(1, 2)
        return made(heads), made(kv_heads), angle.cos().to(dtype)[None], angle.sin().to(dtype)[None]

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
