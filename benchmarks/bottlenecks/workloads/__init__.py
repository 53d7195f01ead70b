"""Lists four training loops that are timed before and after the profiler's advice is applied."""

from collections.abc import Callable

from benchmarks.bottlenecks.workloads import images, llama, sentences
from benchmarks.bottlenecks.workloads.workload import Workload

__all__ = ["WORKLOADS"]

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "sentences": sentences.make,
    "images": images.make,
    "llama": llama.make_llama,
    "qlora": llama.make_qlora,
}
