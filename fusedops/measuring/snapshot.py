"""Saves the state that training steps change and restores it, and copies a model's structure."""

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Snapshot", "shared_copy"]


class Snapshot:
    """Parameters, buffers, gradients, modes, optimizer state and generators, as they are now.

    A `with` block restores them at its end.

    Tensors are copied, so that parameters and optimizer state take their memory twice. `restore`
    writes into the same tensors, so views and references to them stay right; a parameter or buffer
    that a step replaced is the earlier tensor again. Generators: the default ones of torch's CPU
    and CUDA devices, of Python and of numpy, and modules' attributes. Numbers among modules'
    attributes are put back too. Not covered: other generators, files, an iterator's position, and
    what a step keeps elsewhere (a scheduler, a scaler, a list).

    parameters: False leaves out the parameters' content and gradients, for runs without a step.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        parameters: bool = True,
    ) -> None:
        self.model, self.optimizer, self.parameters = model, optimizer, parameters
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in self._owned()]
        self.held: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (held, dict(held))
            for module in (model.modules() if model is not None else ())
            for held in (module._parameters, module._buffers)
        ]
        self.gradients = [
            (p, p.grad, _cloned(p.grad)) for p in (self._parameters() if parameters else ())
        ]
        self.modes = [(m, m.training) for m in model.modules()] if model is not None else []
        self.numbers, self.module_generators = _attributes(model)
        self.state = _copied(optimizer.state) if optimizer is not None else {}
        self.groups = _settings(optimizer) if optimizer is not None else []
        self.generators = _generators()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        for held, values in self.held:
            held.clear()
            held.update(values)
        with torch.no_grad():
            for tensor, saved in self.tensors:
                tensor.copy_(saved)
            for parameter, grad, content in self.gradients:
                if grad is not None and content is not None:
                    grad.copy_(content)
                parameter.grad = grad
        for module, training in self.modes:
            module.training = training
        for attributes, numbers in self.numbers:  # a step may have deleted some
            attributes.update({name: numbers[name] for name in numbers.keys() & attributes.keys()})
        for generator, state in self.module_generators:
            generator.set_state(state)
        if self.optimizer is not None:
            self._restore_optimizer(self.optimizer)
        _set_generators(self.generators)

    def _owned(self) -> Iterator[Tensor]:
        if self.parameters:
            yield from self._parameters()
        if self.model is not None:
            yield from self.model.buffers()

    def _parameters(self) -> list[Tensor]:
        """The model's and the optimizer's parameters, each once."""
        parameters = list(self.model.parameters()) if self.model is not None else []
        if self.optimizer is not None:
            parameters += [p for group in self.optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in parameters}.values())

    def _restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in [p for p in optimizer.state if p not in self.state]:
            del optimizer.state[parameter]
        with torch.no_grad():
            for parameter, saved in self.state.items():
                optimizer.state[parameter] = _written(optimizer.state.get(parameter), saved)
        for group, settings in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(copy.deepcopy(settings))


def _attributes(model: nn.Module | None) -> tuple[list[Any], list[Any]]:
    """The numbers among each module's attributes; the generators there and their states."""
    held = [vars(module) for module in (model.modules() if model is not None else ())]
    numbers = [
        (values, {name: value for name, value in values.items() if type(value) in (int, float)})
        for values in held
    ]
    generators = [v for values in held for v in values.values() if isinstance(v, torch.Generator)]
    return numbers, [(generator, generator.get_state()) for generator in generators]


def shared_copy(model: nn.Module, caller: str, of: Sequence[Tensor] | None = None) -> nn.Module:
    """A deep copy of a model whose tensors are the model's own: all of them, or those of `of`.

    Hooks are the model's own too: what they belong to may be large, or no model at all.

    Raises ValueError, which begins with `caller`, for a model that cannot be copied.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()] if of is None else [*of]
    for module in model.modules():
        shared += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    try:
        return copy.deepcopy(model, {id(value): value for value in shared})
    except Exception as error:  # a model's own __deepcopy__ can raise anything
        raise ValueError(
            f"{caller}: model must be one that copy.deepcopy copies, got {type(model).__name__}"
        ) from error


def _copied(state: Any) -> dict[Any, Any]:
    """The state of each parameter, with the objects that hold it and copies of their tensors."""
    return {parameter: _copy(value) for parameter, value in state.items()}


@dataclass(frozen=True)
class _Saved:
    """A tensor, and what it held."""

    tensor: Tensor
    content: Tensor


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Saved(value, value.detach().clone())
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy, value))
    return copy.deepcopy(value)


def _written(now: Any, saved: Any) -> Any:
    """The saved value; a tensor is the one that was there, with what it held."""
    if isinstance(saved, _Saved):
        saved.tensor.copy_(saved.content)
        return saved.tensor
    if type(saved) in (list, tuple):
        return type(saved)(_written(None, item) for item in saved)
    if isinstance(saved, dict):
        held = now if isinstance(now, dict) else {}
        values = {key: _written(held.get(key), item) for key, item in saved.items()}
        held.clear()
        held.update(values)
        return held
    return copy.deepcopy(saved)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in groups
    ]


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
