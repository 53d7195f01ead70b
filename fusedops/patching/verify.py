"""verify: compares a patched model and each fused module with the original."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusedops.patching.core.swap import original, original_class
from fusedops.patching.patch import fused_kinds, patched
from fusedops.patching.yardstick import GRADIENT, Batch, Yardstick, fresh, run

__all__ = ["Deviation", "VerifyReport", "verify"]

HEAD = "path", "was", "fused", "furthest off", "error", "rounding", ""


@dataclass(frozen=True)
class Deviation:
    """How far one module's results are from a float64 run of the original.

    path: the module's name in the model, empty for the whole model. was: its original class. kinds:
    what is fused in it. result: the output or gradient with the largest error. error: that error,
    relative to the result's largest element. rounding: the same for the original in its own dtype.
    right: whether all results are within what rounding allows, as in `patch(verify=...)`.
    """

    path: str
    was: str
    kinds: str
    result: str
    error: float
    rounding: float
    right: bool


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`. `print(report)` shows a table.

    sites: the fused modules, in the model's order; each was called with the original's inputs.
    whole: the model's outputs and loss, and its gradients.
    """

    sites: list[Deviation]
    whole: list[Deviation]

    @property
    def right(self) -> bool:
        """Whether no error exceeds what rounding explains."""
        return all(deviation.right for deviation in [*self.sites, *self.whole])

    @property
    def worst(self) -> Deviation | None:
        """The site with the largest error, preferring those beyond rounding."""
        return max(self.sites, key=lambda site: (not site.right, site.error), default=None)

    def __str__(self) -> str:
        wrong = sum(not site.right for site in self.sites)
        head = f"fusedops.verify  {len(self.sites)} fused modules, {wrong} beyond rounding"
        rows = [HEAD, *map(_row, [*self.sites, *self.whole])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        worst = [f"furthest off: {_place(self.worst)}"] if self.worst else []
        return "\n".join([head, *lines, *worst])


def verify(model: nn.Module, batch: Batch) -> VerifyReport:
    """Compares a patched model with the original, module by module and as a whole.

    batch: the model's keyword arguments in a dict, its positional ones in a tuple or list, or one
    tensor. Each fused module is called with the inputs that it gets in a run of the original, so
    its errors do not include those of earlier modules. A layer's errors include those of the
    modules inside it. If a module is called several times, the first call counts. If the model is
    not patched, it is patched with the defaults during the call. Afterwards gradients, the random
    state and the modules' modes are as before.

    Takes memory for the inputs of all fused modules and a float64 copy of the model. Raises
    TypeError if model is not a module, and ValueError if it returns no floating-point results.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify: model must be a torch.nn.Module, got {type(model).__name__}")
    with ExitStack() as stack:
        if not any(map(fused_kinds, model.modules())):
            stack.enter_context(patched(model))
        fused = {p: m for p, m in model.named_modules() if p and fused_kinds(m)}
        calls = _calls(model, batch, fused)
        sites = [_call_deviation(path, fused[path], call) for path, call in calls.items()]
        whole = _model_deviations(model, batch)
    return VerifyReport([site for site in sites if site], whole)


class _Calls(nn.Module):
    """A call to a module. Inputs that need gradients are parameters; the others are the batch."""

    def __init__(self, module: nn.Module, form: Any, values: list, needed: list[bool]) -> None:
        super().__init__()
        self.module = module
        self.given = lambda values: tree_unflatten(values, form)
        self.names = [f"input_{i}" for i in range(len(values))]
        self.batch: dict[str, Any] = {}
        for name, value, gradient in zip(self.names, values, needed, strict=True):
            if gradient:
                self.register_parameter(name, nn.Parameter(value.clone()))
            else:
                self.batch[name] = fresh(value)

    def forward(self, **batch: Any) -> Any:
        leaves: Any = self._parameters
        # Times 1: a module may write to its inputs in place, which a leaf does not allow.
        values = [leaves[name] * 1 if name in leaves else batch[name] for name in self.names]
        args, kwargs = self.given(values)
        return self.module(*args, **kwargs)


def _calls(model: nn.Module, batch: Batch, modules: dict[str, nn.Module]) -> dict[str, _Calls]:
    """Each module's first call in a run of the original, in the model's order.

    One run with gradients shows which inputs need them. A second run without gradients records the
    values, so that nothing (a cache in particular) keeps a graph alive. Compiled parts run as
    Python: a graph made earlier would skip the hooks, and one made now would keep them.
    """
    needed: dict[str, list[bool]] = {}
    first_calls: dict[str, _Calls] = {}

    def ask(path: str, module: nn.Module, given: tuple) -> None:
        values, _ = tree_flatten(given)
        needed.setdefault(path, [isinstance(v, Tensor) and v.requires_grad for v in values])

    def keep(path: str, module: nn.Module, given: tuple) -> None:
        values, form = tree_flatten(given)
        if path not in first_calls:
            first_calls[path] = _Calls(module, form, values, needed[path])

    with original(model), torch.compiler.set_stance("force_eager"):
        with _watched(modules, ask):
            run(model, batch)
        with _watched(modules, keep):
            run(model, batch, gradients=False)
    return {path: first_calls[path] for path in modules if path in first_calls}


@contextmanager
def _watched(modules: dict[str, nn.Module], seen: Callable) -> Iterator[None]:
    """Calls `seen(path, module, (args, kwargs))` before each call to one of the modules."""
    hooks: list[Any] = []
    try:
        for path, module in modules.items():
            hook = partial(_tell, seen, path)
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tell(seen: Callable, path: str, module: nn.Module, *given: Any) -> None:
    seen(path, module, given)


def _call_deviation(path: str, module: nn.Module, call: _Calls) -> Deviation | None:
    """A module's deviation in one call; None if it returns no floating-point results.

    Only outputs of the fused module count: fused attention returns no attention weights.
    """
    try:
        returned = run(call, call.batch, gradients=False)
        before = Yardstick(call, call.batch, partial(run, only=returned.keys()))
    except ValueError:
        return None
    results = before.results(call, call.batch)
    names = list(before.exact)
    return _furthest(path, module, ", ".join(fused_kinds(module)), before, results, names, call)


def _model_deviations(model: nn.Module, batch: Batch) -> list[Deviation]:
    before = Yardstick(model, batch)
    results = before.results(model, batch)
    gradients = [name for name in before.exact if name.startswith(GRADIENT)]
    others = [name for name in before.exact if name not in gradients]
    groups = ("outputs", others), ("gradients", gradients)
    return [
        _furthest("", model, what, before, results, names, model) for what, names in groups if names
    ]


def _furthest(
    path: str,
    module: nn.Module,
    kinds: str,
    before: Yardstick,
    results: dict[str, Tensor],
    names: list[str],
    judged: nn.Module,
) -> Deviation:
    """The result with the largest error, preferring those beyond rounding."""
    off = set(before.off(results, judged))
    worst = max(names, key=lambda n: (n in off, _share(results.get(n), before, n)))
    rounding = max(_share(seen.get(worst), before, worst) for seen in before.seen)
    error = _share(results.get(worst), before, worst)
    result = worst.replace("module.", "", 1) if isinstance(judged, _Calls) else worst
    was = original_class(module).__name__
    return Deviation(path, was, kinds, result, error, rounding, off.isdisjoint(names))


def _share(result: Tensor | None, before: Yardstick, name: str) -> float:
    """The largest error relative to the exact result's largest element; inf if it is missing."""
    exact = before.exact[name].double()
    if result is None or not exact.numel():
        return 0.0 if result is not None else math.inf
    off = (result - exact).masked_fill(result == exact, 0.0).abs().max().item()
    size = max(exact.abs().max().item(), before.typical if name.startswith(GRADIENT) else 0.0)
    return off / size if size else off


def _row(deviation: Deviation) -> tuple[str, ...]:
    verdict = "" if deviation.right else "BEYOND ROUNDING"
    numbers = f"{deviation.error:.1e}", f"{deviation.rounding:.1e}"
    result = deviation.path or "the model", deviation.was, deviation.kinds, deviation.result
    return *result, *numbers, verdict


def _place(deviation: Deviation) -> str:
    result = f"{deviation.path} ({deviation.was}), {deviation.result}"
    return f"{result}, by {deviation.error:.1e} of its largest element"
