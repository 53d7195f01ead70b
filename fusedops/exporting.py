"""Whether an export is under way that has to see torch's own operators in the place of ours."""

import torch

__all__ = ["exports_onnx"]


def exports_onnx() -> bool:
    """Whether torch.onnx.export(dynamo=False) is tracing: ONNX has none of our operators."""
    return torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export()
