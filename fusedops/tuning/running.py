"""Runs and times a training step with one `Setting`, on the model's own parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fusedops.measuring.changes import fitting_threads
from fusedops.measuring.sampling import Timed
from fusedops.measuring.snapshot import shared_copy
from fusedops.tuning.knobs import TunedStep
from fusedops.tuning.setting import Setting

__all__ = ["MakeBatch", "Running"]

MakeBatch = Callable[[int, int | None], Any]


class Running:
    """step and its batches. It runs what `setting.code` prints, on a copy of the model's structure.

    The copy has the model's tensors, so several settings can take turns.
    """

    def __init__(
        self, setting: Setting, subject: TunedStep, make_batch: MakeBatch, length: int | None
    ) -> None:
        self.setting = setting
        self.threads = (
            fitting_threads() if "threads" in setting.changes else torch.get_num_threads()
        )
        before = torch.get_num_threads()
        defined: dict[str, Any] = {}
        exec(setting.code, defined)  # this package's own text: see Setting
        try:
            tuned = defined["tuned"](shared_copy(subject.model, "tune"), subject.optimizer)
            self.model, self.optimizer, self.step = tuned
        finally:
            torch.set_num_threads(before)
        self.batches = _batches(setting, make_batch, length)

    def __call__(self, batch: Any = None) -> Timed:
        """Fetches the next batch and runs a step on it; the batch that is given is not used."""
        with self._threads():
            start = perf_counter()
            self.step(next(self.batches))
            return Timed(perf_counter() - start)

    def loss(self, batches: list[Any], size: int) -> float:
        """The last loss of steps on these batches of `size` samples, cut to the setting's batch."""
        with self._threads():
            for batch in batches:
                loss = self.step({name: self._cut(t, size) for name, t in batch.items()})
        return float(loss)

    def _cut(self, t: Tensor, size: int) -> Tensor:
        return t[: self.setting.batch] if t.dim() and len(t) == size else t

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class _Endless(IterableDataset):
    def __init__(self, make_batch: MakeBatch, batch: int, length: int | None) -> None:
        self.make_batch, self.batch, self.length = make_batch, batch, length

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.make_batch(self.batch, self.length)


def _batches(setting: Setting, make_batch: MakeBatch, length: int | None) -> Iterator[Any]:
    endless = _Endless(make_batch, setting.batch, length)
    if not setting.workers:
        return iter(endless)
    return iter(DataLoader(endless, batch_size=None, num_workers=setting.workers))
