"""Runs fetch and step in a loop, with the user's DataLoader or one with worker processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["PREFETCHED", "Loop", "why_no_workers"]

PREFETCHED = 2  # batches that each worker makes ahead


def why_no_workers(data: Any) -> str:
    """Why data cannot be read by workers instead; empty if it can."""
    if type(data) is not DataLoader:
        return "the data is not a torch DataLoader"
    if data.num_workers:
        return f"the DataLoader has {data.num_workers} workers"
    if isinstance(data.dataset, IterableDataset):
        return "each worker would read the whole iterable dataset"
    return ""


class Loop:
    """Each call of `once` fetches a batch and runs the step, until `close`.

    It restarts the loader when it ends. Its samplers' own generator is put back by `close`.
    """

    def __init__(self, step: Callable[[Any], Any], loader: DataLoader, workers: int) -> None:
        self.step, self.loader, self.workers = step, loader, workers
        self.untimed = 1 + PREFETCHED * workers  # so that no batch of a pause is in the time
        self._other = _with_workers(loader, workers)
        self._iterators: dict[int, Iterator[Any]] = {}
        self._now = loader
        self._generators = [(g, g.get_state()) for g in _generators(loader)]

    def once(self) -> None:
        self.step(self._next())

    @contextmanager
    def change(self) -> Iterator[None]:
        """Batches come from workers."""
        self._now = self._other
        try:
            yield
        finally:
            self._now = self.loader

    def close(self) -> None:
        """Ends the workers."""
        self._iterators.clear()
        self._other._iterator = None
        for generator, state in self._generators:
            generator.set_state(state)

    def _next(self) -> Any:
        for _ in range(2):
            iterator = self._iterators.get(id(self._now))
            if iterator is None:
                iterator = self._iterators[id(self._now)] = iter(self._now)
            try:
                return next(iterator)
            except StopIteration:
                del self._iterators[id(self._now)]
        raise ValueError("the DataLoader gives no batch")


def _with_workers(loader: DataLoader, workers: int) -> DataLoader:
    if loader.batch_sampler is None:
        batches: dict[str, Any] = {"batch_size": None, "sampler": loader.sampler}
    else:
        batches = {"batch_sampler": loader.batch_sampler}
    return DataLoader(
        loader.dataset,
        **batches,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        prefetch_factor=PREFETCHED,
        persistent_workers=True,
    )


def _generators(loader: DataLoader) -> list[torch.Generator]:
    """The generators of the loader and its samplers, each once."""
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    generators = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())
