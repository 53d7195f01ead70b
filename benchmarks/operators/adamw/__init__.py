"""AdamW benchmarks: a step's time, and each state format's training loss."""

from benchmarks.operators.adamw.gpu import GPU_ROWS

__all__ = ["GPU_ROWS"]
