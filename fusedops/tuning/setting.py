"""`Setting`: the options of a training step, and the Python code that sets it up.

A trial runs the same code that is printed, so what was measured is what a user gets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

from fusedops.measuring.changes import CHANGES

__all__ = ["Setting"]

BF16 = "bf16"  # its code stands around the forward

HEAD = '''\
import torch

import fusedops


def tuned(model, optimizer):
    """Sets up what fusedops.tune found. Returns the model, the optimizer and step(batch)."""
'''
PARTS = '''\
    def parts(batch):
        """Cuts the tensors that have a row for each of {batch} samples."""
        for i in range(0, {batch}, {size}):
            cut = slice(i, i + {size})
            rows = {{k: t.dim() > 0 and len(t) == {batch} for k, t in batch.items()}}
            yield {{k: t[cut] if rows[k] else t for k, t in batch.items()}}

'''


@dataclass(frozen=True)
class Setting:
    """A training step's settings. batch: samples of one optimizer step.

    changes: names of `fusedops.measuring.changes.CHANGES`. micro_batches: into which a batch is
    cut; their gradients add up to the batch's if all have as many labels. workers: of the
    DataLoader that calls make_batch; 0 calls it in the step.
    """

    batch: int
    changes: tuple[str, ...] = ()
    micro_batches: int = 1
    workers: int = 0

    @property
    def code(self) -> str:
        """Python that defines tuned(model, optimizer), and how to feed it."""
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield HEAD
        yield "    model.train()\n"
        for name, change in CHANGES.items():
            if name in self.changes and name != BF16:
                yield indent(change.code, "    ")
        yield "\n"
        yield from self._step()
        yield "    return model, optimizer, step\n"

    def _step(self) -> Iterator[str]:
        """The lines of step(batch)."""
        many = self.micro_batches > 1
        if many:
            yield PARTS.format(batch=self.batch, size=self.batch // self.micro_batches)
        yield "    def step(batch):\n        optimizer.zero_grad()\n"
        depth = " " * 8
        if many:
            yield f"{depth}total = 0.0\n{depth}for part in parts(batch):\n"
            depth += " " * 4
        given = "part" if many else "batch"
        if BF16 in self.changes:
            yield f"{depth}{CHANGES[BF16].code}{depth}    "
        else:
            yield depth
        yield f"loss = model(**{given}).loss{f' / {self.micro_batches}' if many else ''}\n"
        yield f"{depth}loss.backward()\n"
        if many:
            yield f"{depth}total += loss.detach()\n"
        yield "        optimizer.step()\n"
        yield f"        return {'total' if many else 'loss.detach()'}\n\n"

    def feeding(self) -> str:
        """How batches are to be made: the batch's size, and a DataLoader's workers."""
        lines = [f"# batches of {self.batch}"]
        if self.workers:
            lines.append(f"# made by a DataLoader with num_workers={self.workers}")
        return "\n".join(lines)
