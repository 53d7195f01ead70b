"""Compares an implementation's results and gradients with float64 and eager references."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness.case import FORWARD, TRAINING, Run, bind, grad_mode
from fusedops.testing import Errors, errors, has_rows, mean

Outputs = tuple[Tensor, ...]
Judged = dict[str, "list[Errors] | str"]  # for each result


class Answers:
    """The reference in float64 (exact) and in the dtype of `inputs` (eager), computed once.

    rows: reshapes a result so that its last dimension is `fusedops.testing.yardstick`'s row.
    """

    def __init__(
        self,
        reference: Callable,
        mode: str,
        inputs: Outputs,
        seed: int = 1,
        rows: Callable[[Tensor], Tensor] = torch.Tensor.detach,
    ) -> None:
        generator = torch.Generator(inputs[0].device).manual_seed(seed)
        outputs = as_tuple(reference(*inputs))
        self.grads = tuple(_cotangent(y, generator) for y in outputs)
        self.mode, self.inputs, self.leaves, self.rows = mode, inputs, leaves(inputs), rows
        self.eager = self._results(lambda: reference(*inputs), self.leaves, self.grads)
        wide = tuple(_wide(t) for t in inputs)
        wide_grads = tuple(g.double() for g in self.grads)
        self.exact = self._results(lambda: reference(*wide), leaves(wide), wide_grads)

    def errors(self, run: Run) -> Judged:
        """Returns the errors of each result of `run`, or a text if a result cannot be compared."""
        results = self._results(run, self.leaves, self.grads)
        if len(results) != len(self.exact):
            return {"outputs": f"{len(results)} results instead of {len(self.exact)}"}
        names = [f"output {i}" for i in range(len(self.grads))]
        names += [f"gradient {i}" for i in range(len(self.leaves))]
        # forward has no gradients
        judged = zip(names, results, self.eager, self.exact, strict=False)
        return {name: _errors(*three, self.rows) for name, *three in judged}

    def _results(self, run: Run, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Outputs:
        with grad_mode(self.mode):
            results = as_tuple(run())
            if self.mode != FORWARD:
                results += as_tuple(bind(run, TRAINING, inputs, grads)())
        return tuple(t.detach() for t in results)


def fault(draws: Sequence[Judged], times: float = 2) -> str | None:
    """The first result with too large an error in the mean over draws of inputs, or None."""
    for name, verdict in (pair for draw in draws for pair in draw.items()):
        if isinstance(verdict, str):
            return f"{name}: {verdict}"
    for name in draws[0]:
        for same in zip(*(draw[name] for draw in draws), strict=True):
            complaint = mean(same).complaint(times)
            if complaint:
                return f"{name}: {complaint}"
    return None


def _errors(result: Tensor, eager: Tensor, exact: Tensor, rows: Callable) -> list[Errors] | str:
    """Errors over the whole tensor and, if it has rows, over each row; or another fault."""
    if (result.shape, result.dtype) != (eager.shape, eager.dtype):
        return f"{result.dtype} {list(result.shape)}, not {eager.dtype} {list(eager.shape)}"
    if exact.numel() == 0:
        return []
    three = rows(result), rows(eager), rows(exact)
    by_row = (False, True) if has_rows(three[-1]) else (False,)
    measured = [errors(*three, rows=rows) for rows in by_row]
    wrong = [error for error in measured if isinstance(error, str)]
    return wrong[0] if wrong else [error for error in measured if isinstance(error, Errors)]


def _cotangent(output: Tensor, generator: torch.Generator) -> Tensor:
    """Integer results, such as codes, have no gradient.

    A loss's is a power of two, which rounds nothing: a gradient that is made in the forward pass is
    rounded before it is multiplied by this.
    """
    if output.dtype.itemsize == 1:
        return torch.zeros_like(output)
    if output.dim() == 0:
        return torch.full_like(output, -2)
    return torch.empty_like(output).normal_(generator=generator)


def leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in inputs if t.requires_grad]


def _wide(t: Tensor) -> Tensor:
    """In float64; indices are unchanged."""
    wide = t.detach().double() if t.is_floating_point() else t.detach()
    return wide.requires_grad_(t.requires_grad)


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> Outputs:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
