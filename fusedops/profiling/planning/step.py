"""Runs a training step, forward or generation on the meta device to predict its memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedops.measuring.memory.allocations import Allocation
from fusedops.measuring.memory.watch import AllocationWatch, cache_tensors, static_tensors
from fusedops.profiling.planning.inputs import check_inputs, ids_of, inputs_of
from fusedops.profiling.planning.meta import Tracker, tracked
from fusedops.profiling.planning.models import raised, takes
from fusedops.profiling.planning.request import Request
from fusedops.profiling.planning.values import Values, tensors_in

__all__ = ["FakeStep", "blocks", "loss_of", "run_step"]


@dataclass
class FakeStep:
    """A step's allocations, and when each block began and ended.

    blocks: path -> times at which its forward began and ended, recomputations too. gradients:
    (time, path of the module) of each gradient, in order. backward: when backward begins, 0
    without one. step: when the optimizer's step begins.
    """

    allocations: list[Allocation]
    blocks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    gradients: list[tuple[int, str]] = field(default_factory=list)
    backward: int = 0
    step: int = 0


def run_step(model: Any, asked: Request, values: Values) -> FakeStep:
    """Runs the step that is asked for. Raises RuntimeError with what the model raises."""
    check_inputs(model, asked)
    tracker = Tracker(values)
    for t, category, module in static_tensors(model, None):
        tracker.add(t, category, module)
    run = FakeStep(tracker.allocations)

    def see(t: Tensor, category: str, module: str) -> None:
        tracker.see(t, category, module)
        if category == "gradients":
            run.gradients.append((tracker.tick(), module))

    handles = list(_time_blocks(model, tracker, run))
    try:
        with tracked(tracker), AllocationWatch(model, see):
            run.backward = _MODES[asked.mode](model, asked, tracker) or 0
    except Exception as error:
        is_dict = isinstance(asked.batch, Mapping) or "needs the numbers" in str(error)
        hint = "" if is_dict else "; batch may be a dict of what its forward takes"
        raise RuntimeError(
            f"memory: model_or_config must run on the meta device, got {type(model).__name__}, "
            f"which raised {raised(error)}{hint}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    run.step = tracker.tick()
    return run


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated layers: the modules in its lists, not those inside of other blocks."""
    repeated: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(f"{block}.") for block in repeated)
        if isinstance(module, nn.ModuleList) and not inside:
            repeated |= {f"{path}.{name}": child for name, child in module.named_children()}
    return repeated


def _time_blocks(model: nn.Module, tracker: Tracker, run: FakeStep) -> Iterator[Any]:
    for path, block in blocks(model).items():
        times = run.blocks.setdefault(path, [])
        began: list[int] = []

        def enter(*_: object, began: list[int] = began) -> None:
            began.append(tracker.tick())

        def leave(*_: object, began: list[int] = began, times: list = times) -> None:
            times.append((began.pop(), tracker.tick()))

        if next(block.children(), None) is not None:  # patch replaces no leaf that has hooks
            yield block.register_forward_pre_hook(enter)
            yield block.register_forward_hook(leave, always_call=True)


def _train(model: Any, asked: Request, tracker: Tracker) -> int:
    """Returns the time at which backward begins."""
    given = _inputs(model, asked, tracker)
    loss = loss_of(model(**given))
    backward = tracker.tick()
    loss.backward()
    return backward


def _forward(model: Any, asked: Request, tracker: Tracker) -> None:
    with torch.no_grad():
        model(**_inputs(model, asked, tracker))


def _generate(model: Any, asked: Request, tracker: Tracker) -> None:
    """Reads all tokens but the last, then the last with the cache of the others."""
    name = "input_ids"
    more: dict[str, Any] = {"use_cache": True}
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            name = "decoder_input_ids"
            ids = _ids(model, asked.batch, asked.length, tracker)
            more["encoder_outputs"] = model.get_encoder()(input_ids=ids)
        elif "logits_to_keep" in takes(model):
            more["logits_to_keep"] = 1
        parts = [n for n in (asked.length - 1, 1) if n]
        for tokens in parts:
            out = model(**{name: _ids(model, asked.batch, tokens, tracker)}, **more)
            more["past_key_values"] = out.past_key_values
            for t in cache_tensors(out.past_key_values):
                tracker.see(t, "kv_cache", "")
            del out


_MODES: dict[str, Callable[[Any, Request, Tracker], int | None]] = {
    "train": _train,
    "forward": _forward,
    "generate": _generate,
}


def _ids(model: Any, batch: int, length: int, tracker: Tracker) -> Tensor:
    ids = ids_of(model, batch, length)
    tracker.see(ids, "inputs", "")
    return ids


def _inputs(model: Any, asked: Request, tracker: Tracker) -> dict[str, Any]:
    given = inputs_of(model, asked, tracker.values)
    for t in tensors_in(given):
        tracker.see(t, "inputs", "")
    return given


def loss_of(out: Any) -> Tensor:
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    floats = (t for t in tree_leaves(_plain(out)) if isinstance(t, Tensor) and t.requires_grad)
    first = next(floats, None)
    if first is None:
        raise RuntimeError("its output has no gradient")
    return first.sum()


def _plain(out: Any) -> Any:
    return dict(out) if isinstance(out, dict) else out
