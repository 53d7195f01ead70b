"""Times the calls of a model's frozen linears, unchanged and quantized."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.measuring.clock import running_seconds
from fusedops.patching.quantize import quantized_layer, sites
from fusedops.profiling.collect.rounds import Timing, rounds
from fusedops.profiling.evidence import SiteTime

__all__ = ["FORMAT", "quantizable", "quantized", "time_frozen"]

FORMAT = "nf4"
WANTED_S = 1.0  # the budget must have so much time left, and a step's

Key = tuple[Any, ...]


def quantizable(model: nn.Module) -> dict[str, nn.Linear]:
    """Frozen linears that `fusedops.quantize` would quantize: no embedding, no head."""
    found = {path: linear for path, linear, reason in sites(model, ("lm_head",)) if not reason}
    return {path: linear for path, linear in found.items() if not linear.weight.requires_grad}


@contextmanager
def quantized(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """These layers take the places of the model's own."""
    own = {path: model.get_submodule(path) for path in layers}
    try:
        for path, layer in layers.items():
            model.set_submodule(path, layer)
        yield
    finally:
        for path, layer in own.items():
            model.set_submodule(path, layer)


def time_frozen(
    model: nn.Module, call: Callable[[], Any], step_s: float, deadline: float
) -> tuple[tuple[SiteTime, ...], str]:
    """Calls of the same shapes and dtypes in one step are one row; or the reason for none.

    call: one step, which takes `step_s`. deadline: of `perf_counter`.
    """
    if any(p.device.type != "cpu" for p in model.parameters()):
        return (), "only calls on CPUs are timed"
    if perf_counter() + 2 * step_s + WANTED_S > deadline:
        return (), "the budget had no time for it"
    try:
        pieces, counts = _seen(quantizable(model), call)
        timings = {key: Timing([piece]) for key, piece in pieces.items()}
        for timing in timings.values():
            timing.warm_up()
        rounds([*timings.values()], deadline)
    except Exception as error:  # noqa: BLE001  the user's step, under hooks
        return (), f"a step raised {type(error).__name__}: {error}"
    return tuple(
        SiteTime(
            "quantize",
            "Linear",
            f"{list(key[0])} {list(key[1])}",
            counts[key],
            tuple(timing.before),
            tuple(timing.after),
        )
        for key, timing in timings.items()
    ), ""


def _seen(
    linears: dict[str, nn.Linear], call: Callable[[], Any]
) -> tuple[dict[Key, "_Call"], Counter[Key]]:
    """One call for each key in a step, and how many there are."""
    pieces: dict[Key, _Call] = {}
    counts: Counter[Key] = Counter()

    def before(linear: Any, args: tuple) -> None:
        (x,) = args
        backward = torch.is_grad_enabled() and x.requires_grad
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        shapes = tuple(x.shape), tuple(linear.weight.shape)
        key = (*shapes, x.dtype, linear.weight.dtype, backward, cast)
        counts[key] += 1
        if key not in pieces:
            pieces[key] = _Call(linear, x.detach(), backward, cast)

    with ExitStack() as hooks:
        for linear in dict.fromkeys(linears.values()):  # one may have two paths
            hooks.callback(linear.register_forward_pre_hook(before).remove)
        call()
    for piece in pieces.values():
        piece.quantize()
    return pieces, counts


class _Call:
    """A call of a linear on the tensor that it got, forward and the gradient of its input."""

    def __init__(
        self, linear: nn.Linear, x: Tensor, backward: bool, cast: torch.dtype | None
    ) -> None:
        self.layers: list[nn.Module] = [linear]
        self.x, self.backward, self.cast = x.requires_grad_(backward), backward, cast
        self.seconds = 0.0

    def quantize(self) -> None:
        """Once the hooks are gone, with which a linear is not quantized."""
        self.layers.append(quantized_layer("", self.layers[0], FORMAT, {}))

    def warm_up(self, changed: bool) -> None:
        self.timed(changed)
        self.seconds = self.timed(changed)

    def timed(self, changed: bool) -> float:
        return running_seconds(lambda: self._run(self.layers[changed]))

    def _run(self, layer: nn.Module) -> None:
        with torch.set_grad_enabled(self.backward):
            with nullcontext() if self.cast is None else torch.autocast("cpu", self.cast):
                y = layer(self.x)
            if self.backward:
                torch.autograd.grad(y, self.x, torch.ones_like(y))
