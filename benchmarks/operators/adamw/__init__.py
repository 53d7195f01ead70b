"""AdamW: the time of a step, and the loss that its state formats train to."""

from benchmarks.operators.adamw.gpu import GPU_MUST_SHOW, GPU_ROWS

__all__ = ["GPU_MUST_SHOW", "GPU_ROWS"]
