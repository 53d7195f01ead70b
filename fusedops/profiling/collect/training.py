"""Finds what a loop trains, while the loop runs: its models and its optimizers."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fusedops.profiling.collect.forwards import Forwards, compiled_modules

__all__ = ["Training", "largest", "parameters_of"]


class Training:
    """Sees every module's forward and, through `stepped`, every optimizer's step until `close`.

    optimizers: in the order of their first steps.
    """

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._outermost: dict[nn.Module, None] = {}  # modules that ran with gradients, in order
        self._running: list[nn.Module] = []
        self._forwards: Forwards | None = None
        self._is_over = False

    def __enter__(self) -> "Training":
        self._forwards = Forwards(self._begins, self._ends)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the modules' hooks; `stepped` does nothing any more."""
        self._is_over = True
        if self._forwards is not None:
            self._forwards.close()

    @property
    def models(self) -> list[nn.Module]:
        """The outermost modules that own parameters of an optimizer, the largest first.

        The forward of a module that is compiled in place is not seen; its parameters are.
        """
        trained = {p for optimizer in self.optimizers for p in parameters_of(optimizer)}
        inner = {m for outermost in self._outermost for m in outermost.modules()}
        compiled = [m for m in compiled_modules() if m not in inner]
        inner.update(part for m in compiled for part in m.modules() if part is not m)
        shares = {
            module: _elements(trained.intersection(module.parameters()))
            for module in (*self._outermost, *(m for m in compiled if m not in inner))
        }
        return sorted((m for m, share in shares.items() if share), key=lambda m: -shares[m])

    def _begins(self, module: nn.Module) -> None:
        if not self._running and torch.is_grad_enabled():
            self._outermost[module] = None
        self._running.append(module)

    def _ends(self, module: nn.Module, _: object) -> None:
        if module in self._running:  # else its forward began before the block
            while self._running.pop() is not module:
                pass

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A hook after the steps of optimizers."""
        if not self._is_over and not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)


def largest(optimizers: Iterable[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """The one with the most parameters; None without one."""
    return max(optimizers, key=lambda o: _elements(parameters_of(o)), default=None)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _elements(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() for p in parameters)
