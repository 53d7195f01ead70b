"""A training step in one setting, at work on the model's own parameters."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fusedops.patching import unpatch
from fusedops.sweeping.modes import Timed
from fusedops.sweeping.variants import shared_copy
from fusedops.tuning.knobs import Subject
from fusedops.tuning.setting import Setting

__all__ = ["MakeBatch", "Running"]

MakeBatch = Callable[[int, int | None], Any]


class Running:
    """step and its batches. It runs what `setting.code` prints, on a copy of the model's structure.

    The copy has the model's tensors, so several settings can take turns.
    """

    def __init__(
        self, setting: Setting, subject: Subject, make_batch: MakeBatch, length: int | None
    ) -> None:
        self.setting = setting
        self.threads = setting.threads or torch.get_num_threads()
        before = torch.get_num_threads()
        defined: dict[str, Any] = {}
        exec(setting.code, defined)  # this package's own text: see Setting
        copied = shared_copy(subject.model, "tune")
        if not setting.patch:
            unpatch(copied)
        try:
            found = defined["tuned"](copied.train(), subject.optimizer)
            self.model, self.optimizer, self.step = found
        finally:
            torch.set_num_threads(before)
        self.batches = _batches(setting, make_batch, length)

    def __call__(self, batch: Any = None) -> Timed:
        """Fetches the next batch and runs a step on it; the batch that is given is not used."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        start = perf_counter()
        try:
            self.step(next(self.batches))
        finally:
            torch.set_num_threads(before)
        return Timed(perf_counter() - start)

    def loss(self, batches: list[Any]) -> float:
        """The last loss of steps on these batches, cut to the setting's size."""
        for batch in batches:
            cut = {name: tensor[: self.setting.batch] for name, tensor in batch.items()}
            loss = self.step(cut)
        return float(loss)


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
