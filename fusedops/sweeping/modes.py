"""Runs and times one batch in a sweep: a training step, forward or generation."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fusedops.measuring.sampling import Batch, Run, Timed
from fusedops.sweeping.variants import Variant

__all__ = ["MODES", "device_of", "runner", "timed", "tokens_of"]

MODES = ("train", "forward", "generate")


def runner(
    mode: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    chosen: Variant,
    new_tokens: int,
) -> Run:
    """The function that runs a batch through one variant's model and times it."""
    wait = waiting(model)
    if mode == "generate":
        return _generation(model, chosen, new_tokens, wait)
    call = _training(model, optimizer) if mode == "train" else _forward(model)
    return timed(call, wait)


def waiting(model: nn.Module) -> Callable[[], object]:
    """Waits until a GPU has done what it was given; does nothing for a model on a CPU."""
    device = device_of(model)
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def device_of(model: nn.Module | None) -> torch.device:
    """The device of a model's first parameter; the CPU without one."""
    first = None if model is None else next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def timed(call: Callable[[Batch], object], wait: Callable[[], object] = lambda: None) -> Run:
    """A function that runs a step on a batch and times it. wait: returns when it is done."""

    def run(batch: Batch) -> Timed:
        wait()
        start = perf_counter()
        call(batch)
        wait()
        return Timed(perf_counter() - start)

    return run


def _called(model: nn.Module, batch: Batch) -> Any:
    """The model's outputs: a mapping is keyword arguments, a tuple or list positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Callable[[Batch], object]:
    model.train()

    def step(batch: Batch) -> None:
        (model if optimizer is None else optimizer).zero_grad()
        loss = getattr(_called(model, batch), "loss", None)
        if loss is None:
            raise ValueError(
                'sweep: mode "train" needs a model whose output has a loss: give labels in '
                "make_batch's batch, or a step of your own"
            )
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _forward(model: nn.Module) -> Callable[[Batch], object]:
    model.eval()

    @torch.no_grad()
    def step(batch: Batch) -> None:
        _called(model, batch)

    return step


def _generation(model: Any, chosen: Variant, new_tokens: int, wait: Callable[[], object]) -> Run:
    """Generates greedily. transformers asks its stopping criteria after each token."""
    if not hasattr(model, "generate") or importlib.util.find_spec("transformers") is None:
        raise ValueError('sweep: mode "generate" needs a model of transformers with generate()')
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            wait()
            self.times = [perf_counter()]

        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            wait()
            self.times.append(perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    model.eval()
    length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}

    def run(batch: Batch) -> Timed:
        clock = Clock()
        given = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        criteria = StoppingCriteriaList([clock])
        options: dict[str, Any] = {"do_sample": False, "num_beams": 1} | length | chosen.options
        model.generate(**given, **options, stopping_criteria=criteria)
        seconds = perf_counter() - clock.times[0]
        pairs = zip(clock.times[1:], clock.times, strict=False)
        return Timed(seconds, tuple(after - before for after, before in pairs))

    return run


def tokens_of(batch: Batch) -> int | None:
    """Tokens of a batch: the elements of input_ids, or of the tensor that it is."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, torch.Tensor) and not ids.is_floating_point() and ids.dim() == 2:
        return ids.numel()
    return None
