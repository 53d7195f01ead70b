"""Four real training loops, profiled, changed as the report advises, and timed again."""

from collections.abc import Callable

from benchmarks.bottlenecks.workloads import images, llama, qlora, sentences
from benchmarks.bottlenecks.workloads.workload import Workload

__all__ = ["WORKLOADS"]

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "sentences": sentences.make,
    "images": images.make,
    "llama": llama.make,
    "qlora": qlora.make,
}
