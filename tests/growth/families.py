"""Collects the calls for memory-growth tests: the contract's, and more of families' `growth.py`."""

import functools
import importlib
from typing import Any

from contract.family import FAMILIES as CONTRACTS
from contract.family import Call, floating
from torch import Tensor

import fusedops
from fusedops.backends import FAMILIES
from growth.subject import ROWS, Subject


def subject_of(call: Call) -> Subject:
    """Returns a call of the contract as a subject, which runs the kernel whatever is faster."""
    args = call.args(ROWS)
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    trained = [floating(args[i]) and i not in call.still for i in places]

    def inputs() -> list[Tensor]:
        drawn = call.args(ROWS)
        return [drawn[i].requires_grad_(t) for i, t in zip(places, trained, strict=True)]

    def run(*tensors: Tensor) -> Any:
        full = dict(enumerate(args)) | dict(zip(places, tensors, strict=True))
        positional, named = call.by_name(tuple(full.values()))
        return call.function(*positional, **named)

    return Subject(run, inputs, around=functools.partial(fusedops.backend, "cpu"))


# The first call of an operator has its name, others have more behind a comma.
OPERATORS: dict[str, Any] = {}
MODULES: dict[str, Any] = {}
for _family in FAMILIES:
    _contract = CONTRACTS.get(_family)
    for _name, _call in (_contract.calls | _contract.more).items() if _contract else ():
        _taken = _call.operator in OPERATORS
        _key = f"{_call.operator}, {_name}" if _taken else _call.operator
        OPERATORS[_key] = functools.partial(subject_of, _call)
    _growth = importlib.import_module(f"{_family}.growth")
    OPERATORS |= getattr(_growth, "OPERATORS", {})
    MODULES |= getattr(_growth, "MODULES", {})
