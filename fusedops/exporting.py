"""Detects ONNX exports, which need torch's own operators instead of ours."""

import torch

__all__ = ["exports_onnx"]


def exports_onnx() -> bool:
    """Whether torch.onnx.export(dynamo=False) is tracing: ONNX lacks our operators."""
    return torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export()
