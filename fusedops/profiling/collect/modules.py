"""Finds an operator's module, in the forward and in the backward.

torch's ModuleTracker follows the backward through hooks of modules' inputs and outputs. Modules
whose input needs no gradient are never left there, so operators get the wrong name. Here a backward
operator has the module of the forward operator that recorded its autograd node.
"""

import torch
from torch import nn

from fusedops.profiling.collect.forwards import Forwards, class_name

__all__ = ["Modules"]


class Modules:
    """Follows the modules whose forward runs, while it is entered. `current` names the innermost.

    Names are relative to the outermost module whose forward runs, which has its class's name.
    """

    def __init__(self) -> None:
        self._running: list[str] = []
        self._names: dict[nn.Module, str] = {}
        self._of_node: dict[int, str] = {}  # number of an autograd node -> the module
        self._forwards: Forwards | None = None

    def __enter__(self) -> "Modules":
        self._forwards = Forwards(self._enter, self._leave)
        return self

    def __exit__(self, *error: object) -> None:
        if self._forwards is not None:
            self._forwards.close()

    def current(self) -> str:
        """The module of the operator that runs now; empty outside of modules' operators.

        Is called once for each operator, below autograd: the newest node is that operator's.
        """
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():  # else a checkpoint runs a forward
            return self._of_node.get(node._sequence_nr(), "")
        name = self._running[-1] if self._running else ""
        # An operator without a node of its own finds the number of an earlier one, which is known.
        self._of_node.setdefault(torch.autograd._get_sequence_nr() - 1, name)
        return name

    def _enter(self, module: nn.Module) -> None:
        if not self._running and module not in self._names:  # a checkpoint runs a known one again
            names = {submodule: name for name, submodule in module.named_modules()}
            self._names |= names | {module: class_name(module)}
        self._running.append(self._names.get(module, ""))

    def _leave(self, *_: object) -> None:
        if self._running:  # else its forward began before the block
            self._running.pop()
