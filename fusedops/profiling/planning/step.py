"""Runs a training step, forward or generation on the meta device to predict its memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedops.profiling.planning.meta import Tracker, on_meta
from fusedops.profiling.planning.models import takes
from fusedops.profiling.planning.request import Request
from fusedops.profiling.storage.lives import Life
from fusedops.profiling.storage.watch import Watch, cache_tensors, static_tensors

__all__ = ["Run", "blocks", "run_step"]

IMAGE = 224


@dataclass
class Run:
    """The lives of a step's storages, and when each block began and ended.

    blocks: path -> times at which its forward began and ended, recomputations too. gradients:
    (time, path of the module) of each gradient, in order. step: when the optimizer's step begins.
    """

    lives: list[Life]
    blocks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    gradients: list[tuple[int, str]] = field(default_factory=list)
    step: int = 0


def run_step(model: Any, asked: Request) -> Run:
    """Runs the step that is asked for. Raises RuntimeError if the model needs real numbers."""
    tracker = Tracker()
    for t, category, module in static_tensors(model, None):
        tracker.add(t, category, module)
    run = Run(tracker.lives)

    def see(t: Tensor, category: str, module: str) -> None:
        tracker.see(t, category, module)
        if category == "gradients":
            run.gradients.append((tracker.tick(), module))

    handles = list(_time_blocks(model, tracker, run))
    try:
        with on_meta(tracker), Watch(model, see):
            _MODES[asked.mode](model, asked, tracker)
    except (RuntimeError, NotImplementedError) as error:
        message = str(error).partition("\n")[0]
        raise RuntimeError(
            f"memory: model_or_config must run on the meta device, got {type(model).__name__}, "
            f"which raised {type(error).__name__}: {message}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    run.step = tracker.tick()
    return run


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated layers: the modules in its lists, not those inside of other blocks."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found |= {f"{path}.{name}": child for name, child in module.named_children()}
    return found


def _time_blocks(model: nn.Module, tracker: Tracker, run: Run) -> Iterator[Any]:
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


def _train(model: Any, asked: Request, tracker: Tracker) -> None:
    given = _inputs(model, asked, tracker, labels=True)
    loss = _loss(model(**given))
    loss.backward()


def _forward(model: Any, asked: Request, tracker: Tracker) -> None:
    with torch.no_grad():
        model(**_inputs(model, asked, tracker, labels=False))


def _generate(model: Any, asked: Request, tracker: Tracker) -> None:
    """Reads all tokens but the last, then the last with the cache of the others."""
    if not hasattr(model, "generate") or not {"input_ids", "past_key_values"} <= {*takes(model)}:
        what = "a model that generates with a cache"
        raise ValueError(f"memory: mode 'generate' needs {what}, got {type(model).__name__}")
    name = "input_ids"
    more: dict[str, Any] = {"use_cache": True}
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            name = "decoder_input_ids"
            ids = _ids(asked.batch, asked.length, tracker)
            more["encoder_outputs"] = model.get_encoder()(input_ids=ids)
        elif "logits_to_keep" in takes(model):
            more["logits_to_keep"] = 1
        parts = [n for n in (asked.length - 1, 1) if n]
        for tokens in parts:
            out = model(**{name: _ids(asked.batch, tokens, tracker)}, **more)
            more["past_key_values"] = out.past_key_values
            for t in cache_tensors(out.past_key_values):
                tracker.see(t, "kv_cache", "")
            del out


_MODES = {"train": _train, "forward": _forward, "generate": _generate}


def _ids(batch: int, length: int, tracker: Tracker) -> Tensor:
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    tracker.see(ids, "inputs", "")
    return ids


def _inputs(model: Any, asked: Request, tracker: Tracker, labels: bool) -> dict[str, Tensor]:
    names, config = takes(model), getattr(model, "config", None)
    main = getattr(model, "main_input_name", "input_ids")
    given: dict[str, Tensor] = {}
    if main == "pixel_values" and main in names:
        size = getattr(config, "image_size", IMAGE)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = asked.batch, getattr(config, "num_channels", 3), height, width
        given[main] = torch.zeros(shape, dtype=next(model.parameters()).dtype, device="meta")
        tracker.see(given[main], "inputs", "")
    elif "input_ids" in names:
        given["input_ids"] = _ids(asked.batch, asked.length, tracker)
    else:
        got = f"{type(model).__name__}.forward({', '.join(names)})"
        raise ValueError(f"memory: model_or_config must take input_ids or pixel_values, got {got}")
    if labels and "labels" in names:
        classifies = "Classification" in type(_base(model)).__name__
        of_tokens = "Token" in type(_base(model)).__name__
        whole = classifies and not of_tokens
        given["labels"] = _ids(asked.batch, 1 if whole else asked.length, tracker)
        if whole:
            given["labels"] = given["labels"].view(-1)
    elif not labels and getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = _ids(asked.batch, asked.length, tracker)
    return given


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _loss(out: Any) -> Tensor:
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
