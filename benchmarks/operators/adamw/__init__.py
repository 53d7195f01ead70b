"""AdamW benchmarks: a step's time, and the loss that each state format trains to."""

from benchmarks.operators.adamw.gpu import GPU_MUST_SHOW, GPU_ROWS

__all__ = ["GPU_MUST_SHOW", "GPU_ROWS"]
