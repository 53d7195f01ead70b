"""Other libraries' fused norms as GPU benchmark contenders; missing ones are skipped.

A peer must not write into its output gradient: the next call gets the same one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.case import Contender, Run, find
from benchmarks.operators.norm.operations import EPS


def after_the_sum(norm: Callable[..., Tensor], x: Tensor, residual: Tensor, *rest: Any):
    h = residual + x
    return norm(h, *rest), h


def liger(path: str, name: str) -> Callable[..., Tensor]:
    return find(f"liger_kernel.ops.{path}", name).apply


def liger_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Run:
    return partial(liger("layer_norm", "LigerLayerNormFunction"), x, w, b, EPS)


def liger_rms_norm(x: Tensor, w: Tensor) -> Run:
    apply = liger("rms_norm", "LigerRMSNormFunction")
    return partial(apply, x, w, EPS, 0.0, "llama", False)  # False: not in place


def liger_add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Run:
    return partial(after_the_sum, liger("layer_norm", "LigerLayerNormFunction"), x, r, w, b, EPS)


def liger_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Run:
    apply = liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return partial(apply, x, r, w, EPS, 0.0, "llama", False)


def apex_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Run:
    norm = find("apex.normalization.fused_layer_norm", "fused_layer_norm_affine")
    return partial(norm, x, w, b, tuple(w.shape), EPS)


def apex_rms_norm(x: Tensor, w: Tensor) -> Run:
    norm = find("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    return partial(norm, x, w, tuple(w.shape), EPS)


def apex_add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Run:
    norm = find("apex.normalization.fused_layer_norm", "fused_layer_norm_affine")
    return partial(after_the_sum, norm, x, r, w, b, tuple(w.shape), EPS)


def apex_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Run:
    norm = find("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    return partial(after_the_sum, norm, x, r, w, tuple(w.shape), EPS)


def quack_rms_norm(x: Tensor, w: Tensor) -> Run:
    return partial(find("quack.rmsnorm", "rmsnorm"), x, w, eps=EPS)


def quack_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Run:
    return partial(find("quack.rmsnorm", "rmsnorm"), x, w, residual=r, eps=EPS, prenorm=True)


def one_layer_norm(*inputs: Tensor) -> Run:
    """Returns one F.layer_norm of x, whatever the operation: a measure of a call's host time."""
    x = inputs[0]
    return partial(F.layer_norm, x, x.shape[-1:], None, None, EPS)


PEERS: dict[str, dict[str, Callable[..., Run]]] = {
    "layer_norm": {"liger": liger_layer_norm, "apex": apex_layer_norm},
    "rms_norm": {"liger": liger_rms_norm, "apex": apex_rms_norm, "quack": quack_rms_norm},
    "add_layer_norm": {"liger": liger_add_layer_norm, "apex": apex_add_layer_norm},
    "add_rms_norm": {
        "liger": liger_add_rms_norm,
        "apex": apex_add_rms_norm,
        "quack": quack_add_rms_norm,
    },
}


def peers(operation: str) -> dict[str, Contender]:
    return {name: Contender(prepare) for name, prepare in PEERS[operation].items()}
