"""Runs the inputs of a recorded step again: for experiments, and to count a compiled model."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

from fusedops.measuring.snapshot import shared_copy
from fusedops.profiling.collect.arithmetic import Arithmetic

__all__ = ["Batch", "compiled_flops", "loss_of", "replayed_step"]


class Batch(NamedTuple):
    """The arguments of one forward; autocast: its dtype, None outside of autocast.

    Their tensors are apart from the loop's graph, which has been freed when they run again; a
    backward gives no gradients to what the loop made them from.
    """

    args: tuple
    kwargs: dict[str, Any]
    autocast: torch.dtype | None

    @staticmethod
    def of(args: tuple, kwargs: dict[str, Any], device: str) -> "Batch":
        cast = torch.is_autocast_enabled(device)
        args, kwargs = tree_map_only(Tensor, _detached, (args, kwargs))
        return Batch(args, kwargs, torch.get_autocast_dtype(device) if cast else None)


def replayed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Sequence[Batch]], None]:
    """A training step on the inputs of a recorded one.

    Its loss is the model's own; the mean of the outputs stands for one that the loop computes.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")

    def step(batches: Sequence[Batch]) -> None:
        for args, kwargs, cast in batches:
            # Outside of autocast nothing is entered: an experiment may run the step in autocast.
            with nullcontext() if cast is None else torch.autocast(device, cast):
                loss = loss_of(model(*args, **kwargs))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_of(outputs: Any) -> Tensor:
    """A model's loss, else the mean of its outputs that have gradients."""
    is_dictionary = isinstance(outputs, Mapping)
    loss = outputs.get("loss") if is_dictionary else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.sum()
    if is_dictionary:
        outputs = dict(outputs)
    elif not isinstance(outputs, Tensor | list | tuple):
        outputs = getattr(outputs, "__dict__", ())
    values = tree_leaves(outputs)
    terms = [t for t in values if isinstance(t, Tensor) and t.requires_grad]
    scalars = [t for t in terms if t.dim() == 0]  # nanoGPT's (logits, loss)
    if not terms:
        raise RuntimeError("profile: experiments need a model whose outputs have gradients")
    return torch.stack([t.float().mean() for t in scalars or terms]).sum()


def compiled_flops(model: nn.Module, batches: Sequence[Batch]) -> dict[str, int]:
    """Dtype -> operations of a compiled model's forwards and backwards on these inputs.

    A copy without hooks runs uncompiled on the meta device. Raises what the model's own code raises
    there.
    """
    uncompiled = shared_copy(model, "profile")
    for module in uncompiled.modules():
        # A compiled module sets other attributes on the module inside of it.
        vars(module).update(_forward_pre_hooks=OrderedDict(), _forward_hooks=OrderedDict())
    state = dict(uncompiled.named_parameters()) | dict(uncompiled.named_buffers())
    on_meta = {name: _on_meta(tensor) for name, tensor in state.items()}
    flops: dict[str, int] = {}
    for args, kwargs, cast in batches:
        inputs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        with torch.compiler.set_stance("force_eager"), torch.enable_grad(), Arithmetic() as counted:
            loss_of(functional_call(uncompiled, on_meta, *inputs)).backward()
        for dtype, count in counted.flops.items():
            name = dtype if cast is None else str(cast).removeprefix("torch.")
            flops[name] = flops.get(name, 0) + count
    return flops


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
