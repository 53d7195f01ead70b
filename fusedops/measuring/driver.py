"""Driver: access to the GPU that a step uses, through `torch.cuda` and torch.profiler."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.profiler

__all__ = ["Driver", "between"]


@dataclass(frozen=True)
class Driver:
    """One GPU. Its methods do nothing, or return nothing, until the program uses CUDA.

    cuda: the module torch.cuda. profile: the class that records the GPU's activity. kind: of the
    tensors' devices. index: of the device; None for the current one.
    """

    cuda: Any = torch.cuda
    profile: Any = torch.profiler.profile
    kind: str = "cuda"
    index: int | None = None

    @property
    def active(self) -> bool:
        return self.cuda.is_initialized()

    @property
    def device(self) -> torch.device:
        """The device of the tensors on it."""
        if self.kind != "cuda":
            return torch.device(self.kind)
        return torch.device(
            "cuda", self.cuda.current_device() if self.index is None else self.index
        )

    def event(self) -> Any:
        """An event that the device records when it gets there."""
        if not self.active:
            return None
        event = self.cuda.Event(enable_timing=True)
        event.record(self.cuda.current_stream(self.index))
        return event

    def synchronize(self) -> None:
        if self.active:
            self.cuda.synchronize(self.index)

    def stats(self) -> dict[str, int]:
        """The caching allocator's statistics."""
        return dict(self.cuda.memory_stats(self.index)) if self.active else {}

    def count(self) -> int:
        """How many GPUs the machine has."""
        return int(self.cuda.device_count())

    def properties(self) -> Any:
        """torch's: a name, a uuid and more."""
        return self.cuda.get_device_properties(self.index)


def between(first: Any, last: Any) -> float:
    """Seconds between two events that the device has recorded."""
    return first.elapsed_time(last) / 1e3
