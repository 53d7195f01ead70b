"""Times `next` of every torch DataLoader's iterator while a listener is registered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter, thread_time
from typing import Any

__all__ = ["watched_loaders"]

Listener = Callable[[float, float, int, bool], None]

_listeners: list[Listener] = []


@contextmanager
def watched_loaders(listener: Listener) -> Iterator[None]:
    """Calls `listener(seconds, cpu_seconds, workers, gave)` for each `next` of a DataLoader.

    gave: whether it gave a batch; at the end of the data it does not.

    A method of torch is replaced while anyone listens. Blocks may end in any order.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if not _listeners:
        _BaseDataLoaderIter.__next__ = _timed(_BaseDataLoaderIter.__next__)  # type: ignore[method-assign]
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        original = getattr(_BaseDataLoaderIter.__next__, "_fusedops_original", None)
        if not _listeners and original is not None:
            _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]


def _timed(original: Callable[[Any], Any]) -> Any:
    @wraps(original)
    def timed(self: Any) -> Any:
        start, running, gave = perf_counter(), thread_time(), False
        try:
            batch = original(self)
            gave = True
            return batch
        finally:
            seconds, cpu = perf_counter() - start, thread_time() - running
            for listener in tuple(_listeners):
                listener(seconds, cpu, self._num_workers, gave)

    timed._fusedops_original = original  # type: ignore[attr-defined]
    return timed
