"""Quantized-linear benchmarks against F.linear, torch.compile, oneDNN, bitsandbytes and torchao.

Few rows are bound by the weight's bytes, many by arithmetic. The figure that matters is the ratio
to eager in the same dtype; many CPUs run eager's float32 far below their peak, so bfloat16 is
shown too. A shape is (rows, depth, features). Training computes only x's gradient, as with an
adapter: the weight has no gradient, not in eager either.
"""

import torch

from benchmarks.harness.case import FORWARD, TRAINING, Case
from benchmarks.harness.goals import Goal
from benchmarks.operators.quantized_linear.codes import norm_and_codes, norm_and_product
from benchmarks.operators.quantized_linear.gpu import GPU_ROWS
from benchmarks.operators.quantized_linear.operations import (
    DYNAMIC,
    FP8,
    INT4,
    INT8,
    KINDS,
    NF4,
    launch,
    served,
    small,
)
from benchmarks.operators.quantized_linear.quantize import quantize

__all__ = ["GPU_ROWS", "LAUNCH", "MUST_SHOW", "QUICK_ROWS", "ROWS"]

F32, BF16, EAGER = torch.float32, torch.bfloat16, "eager"
WIDE = 4096
DIFFERENTIABLE = ("eager", "eager bfloat16", "compile(eager)", "bitsandbytes", "fusedops")
LAUNCH = [launch()]

# Kind, mode, dtype -> {rows: required speedup over eager}.
ASKED = [
    (DYNAMIC, FORWARD, F32, {1: 7.0, 16: 13.0, 256: 9.0}),
    (INT8, FORWARD, F32, {1: 6.0, 16: 6.0}),
    (INT8, FORWARD, BF16, {1: 4.0, 16: 1.2}),
    (NF4, FORWARD, F32, {1: 9.0, 16: 7.0, 256: 4.0}),
    (INT4, FORWARD, F32, {1: 9.0, 16: 7.0, 256: 4.0}),
    (NF4, TRAINING, F32, {16: 3.0, 256: 3.5}),
]
SERVED = {kind: served(kind) for kind in KINDS}
LARGE = [
    Goal(SERVED[kind], mode, dtype, (rows, WIDE, WIDE), EAGER, {"default": ratio})
    for kind, mode, dtype, asked in ASKED
    for rows, ratio in asked.items()
]

# BERT: depth and features of a layer's linears. No format may be slower than eager.
SMALL = {kind: small(kind) for kind in KINDS}
BERT = [(384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768)]
CHOSEN = [(1, 384, 384), (1, 3072, 768), (8, 768, 768), (32, 384, 1536), (128, 768, 3072)]
CHOSEN += [(512, 1536, 384), (512, 384, 384)]
QUANTIZE = {kind: quantize(kind) for kind in (INT8, INT4, NF4, FP8)}
MUST_SHOW = LARGE + [
    Goal(SMALL[kind], FORWARD, F32, shape, EAGER, {"default": 1.0})
    for kind in KINDS
    for shape in CHOSEN
]
# The goal is the time; eager is the reference's code.
MUST_SHOW += [Goal(QUANTIZE[NF4], FORWARD, F32, (WIDE, WIDE), EAGER, {"default": 1.0}, ms=40)]
ROWS = [
    Case(SERVED[kind], FORWARD, dtype, (rows, WIDE, WIDE))
    for kind, mode, dtype, asked in ASKED
    if mode == FORWARD
    for rows in asked
]
ROWS += [
    Case(SERVED[NF4], TRAINING, F32, (rows, WIDE, WIDE), only=DIFFERENTIABLE) for rows in (16, 256)
]
ROWS += [
    Case(SMALL[kind], FORWARD, F32, (rows, *layer))
    for kind in KINDS
    for layer in BERT
    for rows in (1, 8, 32, 128, 512)
]
ROWS += [Case(operation, FORWARD, F32, (WIDE, WIDE)) for operation in QUANTIZE.values()]
ROWS += [
    Case(operation, FORWARD, BF16, (rows, WIDE, features))
    for operation, features in ((norm_and_product(), WIDE), (norm_and_codes(), 1))
    for rows in (1, 16, 256)
]
QUICK_ROWS = [Case(SMALL[kind], FORWARD, F32, (8, 384, 384)) for kind in KINDS]
