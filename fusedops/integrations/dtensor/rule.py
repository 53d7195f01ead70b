"""The form of a sharding rule, and its registration with DTensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

__all__ = ["ALL", "SUM", "Call", "Placements", "Rule", "Sharding", "register_rule"]

ALL, SUM = Replicate(), Partial()

# A call's arguments by name: DTensor's spec of a tensor, None for one that is not given.
Call = Any
# The placements of the outputs, and of the tensors that are not replicated.
Sharding = tuple[Sequence[Placement], Mapping[str, Placement]]
Placements = Mapping[str, Sequence[Placement]]


def _any(call: Call, current: Placements, target: Placements) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """How an operator may be sharded over one dimension of a mesh.

    returns: which outputs a call has, or None if it has all. shardings: placements that the
    operator takes; it always takes replicated tensors. keeps: (call, current, target) -> whether it
    takes tensors that are redistributed from their current placements to the target's.
    """

    returns: Callable[[Call], Sequence[bool] | None]
    shardings: Callable[[Call], Iterator[Sharding]]
    keeps: Callable[[Call, Placements, Placements], bool] = _any


def register_rule(propagator: Any, op: torch._ops.OpOverload, rule: Rule) -> None:
    """Registers a rule for an operator. DTensor's cache key has every non-tensor argument."""
    arguments = op._schema.arguments
    first = next((i for i, a in enumerate(arguments) if not _is_tensor(a)), len(arguments))
    info = RuntimeSchemaInfo(static_argnum=first, needs_pytree=True)
    propagator.register_op_strategy(op, partial(_strategies, op, rule), info)


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def _strategies(op: torch._ops.OpOverload, rule: Rule, schema: OpSchema) -> OpStrategy:
    values = [_spec(value) for value in schema.args_schema]
    call = SimpleNamespace(**dict(zip((a.name for a in op._schema.arguments), values, strict=True)))
    tensors = [n for n, v in vars(call).items() if hasattr(v, "placements")]
    count = len(op._schema.returns)
    returned = rule.returns(call) or [True] * count
    choices = [([ALL] * count, {}), *rule.shardings(call)]
    lists: list[Any] = [
        [
            *(p if has else None for p, has in zip(outputs, returned, strict=True)),
            *(inputs.get(name, ALL) for name in tensors),
        ]
        for outputs, inputs in choices
    ]
    mesh = schema.get_mesh_from_args()
    strategy = expand_to_full_mesh_op_strategy(mesh, schema, lists, input_index=count)
    current = {name: getattr(call, name).placements for name in tensors}
    strategy.strategies[:] = [
        spec
        for spec in strategy.strategies
        if rule.keeps(call, current, _placements(tensors, spec.input_specs))
    ]
    return strategy


def _spec(value: Any) -> Any:
    return value.strategies[0].output_spec if isinstance(value, OpStrategy) else value


def _placements(names: list[str], specs: Any) -> Placements:
    return {name: spec.placements for name, spec in zip(names, specs, strict=True)}
