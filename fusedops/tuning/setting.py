"""`Setting`: the options of a training step, and the Python code that sets it up.

A trial runs the same code that is printed, so what was measured is what a user gets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Setting"]

HEAD = '''\
import torch

import fusedops


def tuned(model, optimizer):
    """Sets up what fusedops.tune found. Returns the model, the optimizer and step(batch)."""
'''
ADAMW = """\
    names = "params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"
    groups = [{{name: group[name] for name in names}} for group in optimizer.param_groups]
    state = optimizer.state_dict()
    optimizer = {optimizer}(groups)
    if state["state"]:
        optimizer.load_state_dict(state)
"""
PARTS = '''\
    def parts(batch):
        """Cuts the tensors that have a row for each of {batch} samples."""
        for i in range(0, {batch}, {size}):
            cut = slice(i, i + {size})
            rows = {{k: t.dim() > 0 and len(t) == {batch} for k, t in batch.items()}}
            yield {{k: t[cut] if rows[k] else t for k, t in batch.items()}}

'''
FROZEN = """\
    trained = [name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad]
    fusedops.quantize(model, "{format}", skip=["lm_head", *filter(None, trained)])
"""


@dataclass(frozen=True)
class Setting:
    """A training step's settings. batch: samples of one optimizer step.

    optimizer: a class's name, or None for the user's object. micro_batches: into which a batch is
    cut; their gradients add up to the batch's if all have as many labels. threads: torch's, or None
    for the number that was set. workers: of the DataLoader that calls make_batch; 0 calls it in the
    step. quantize: the format of frozen weights.
    """

    batch: int
    patch: bool = False
    optimizer: str | None = None
    bf16: bool = False
    checkpoint: bool = False
    micro_batches: int = 1
    threads: int | None = None
    compile: bool = False
    quantize: str | None = None
    workers: int = 0

    @property
    def code(self) -> str:
        """Python that defines tuned(model, optimizer), and how to feed it."""
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield HEAD
        yield "    model.train()\n"
        if self.threads is not None:
            yield f"    torch.set_num_threads({self.threads})\n"
        if self.quantize is not None:
            yield FROZEN.format(format=self.quantize)
        if self.patch:
            yield "    fusedops.patch(model)\n"
        if self.checkpoint:
            yield "    model.gradient_checkpointing_enable()\n"
        if self.compile:
            yield "    model.compile()\n"
        if self.optimizer is not None:
            yield ADAMW.format(optimizer=self.optimizer)
        yield "\n"
        yield from self._step()
        yield "    return model, optimizer, step\n"

    def _step(self) -> Iterator[str]:
        """The lines of step(batch)."""
        many = self.micro_batches > 1
        if many:
            yield PARTS.format(batch=self.batch, size=self.batch // self.micro_batches)
        yield "    def step(batch):\n        optimizer.zero_grad()\n"
        indent = " " * 8
        if many:
            yield f"{indent}total = 0.0\n{indent}for part in parts(batch):\n"
            indent += " " * 4
        given = "part" if many else "batch"
        if self.bf16:
            yield f'{indent}with torch.autocast("cpu", torch.bfloat16):\n{indent}    '
        else:
            yield indent
        yield f"loss = model(**{given}).loss{f' / {self.micro_batches}' if many else ''}\n"
        yield f"{indent}loss.backward()\n"
        if many:
            yield f"{indent}total += loss.detach()\n"
        yield "        optimizer.step()\n"
        yield f"        return {'total' if many else 'loss.detach()'}\n\n"

    def feeding(self) -> str:
        """How batches are to be made: the batch's size, and a DataLoader's workers."""
        lines = [f"# batches of {self.batch}"]
        if self.workers:
            lines.append(f"# made by a DataLoader with num_workers={self.workers}")
        return "\n".join(lines)

    def changed(self, other: "Setting") -> dict[str, Any]:
        """The fields that differ from another setting."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(other, name)}
