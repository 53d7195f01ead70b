"""Registers the operators' sharding rules and handlers with DTensor.

Imported after torch.distributed.tensor (see AFTER_IMPORT). DTensor sees the kernel operators, since
the public ones and their autograd are C++ above it. A rule lists the placements for which local
kernels compute local parts of the whole tensors' results. DTensor picks the one that moves the
least data; placements that no rule has are redistributed first. An operator without a rule of its
own gathers its arguments.

Losses and experts need more than local kernels: their handlers reduce over the ranks, as torch's
loss_parallel does. Dropout gathers as well, because a kernel's mask depends on the row's number in
its tensor. fusedops/functional/sharded.py gives all ranks the same seed.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fusedops.backends import FAMILIES, kernels
from fusedops.integrations.dtensor import attention, experts, linear_losses, losses, rows
from fusedops.integrations.dtensor.rule import Rule, register_rule

__all__: list[str] = []

RULES = rows.RULES | attention.RULES | linear_losses.RULES
HANDLERS: dict[str, Any] = losses.HANDLERS | linear_losses.HANDLERS | experts.HANDLERS
GATHERED = Rule(lambda call: None, lambda call: iter(()))


def _register() -> None:
    dispatcher = DTensor._op_dispatcher
    for name in [name for family in FAMILIES if family != "adamw" for name in kernels(family)]:
        op = getattr(torch.ops.fusedops, name).default
        if name in HANDLERS:
            dispatcher._custom_op_handlers[op] = HANDLERS[name]
        else:
            register_rule(dispatcher.sharding_propagator, op, RULES.get(name, GATHERED))


try:
    _register()
except AttributeError as error:  # these parts of torch are private
    raise ImportError(f"this torch's DTensor lacks what the rules need: {error}") from error
