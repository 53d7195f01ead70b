"""Warns if a quantized layer loads scales that are NaN or infinite."""

import warnings

from torch import Tensor

__all__ = ["warn_of_scales"]


def warn_of_scales(name: str, scales: object) -> None:
    """Warns if scales are NaN or infinite. name: the scales' path in the model."""
    if not isinstance(scales, Tensor) or scales.is_meta:
        return
    wrong = int((~scales.isfinite()).sum())
    if wrong:
        warnings.warn(
            f"QuantizedLinear: {name} has {wrong} of {scales.numel()} scales that are NaN or "
            "infinite; the weights of their groups are not finite either",
            stacklevel=2,
        )
