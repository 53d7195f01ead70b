"""Optimizer calls for memory-growth tests: repeated steps, state dicts, creation and disposal."""

import contextlib
import copy
import io
from collections.abc import Callable

import torch
from torch import nn

from fusedops import optim
from growth.measure import Watch
from growth.subject import BF16, F32, Turns
from growth.ways import Call, Interruption, interrupt

KINDS = {
    "AdamW": (optim.AdamW, {}),
    "AdamW, bfloat16": (optim.AdamW, {"state_dtype": "bfloat16", "max_grad_norm": 1.0}),
    "AdamW, int8": (optim.AdamW, {"state_dtype": "int8", "min_8bit_size": 0, "amsgrad": True}),
    "AdamW, remainder": (optim.AdamW, {"master_weights": "remainder", "offload": "cpu"}),
    "AdamW8bit": (optim.AdamW8bit, {"min_8bit_size": 512, "max_grad_norm": 1.0}),
}


def parameters() -> list[nn.Parameter]:
    shapes = ((16, 64), F32), ((64,), F32), ((16, 64), BF16), ((3, 5), torch.float64)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in shapes]


def give_gradients(params: list[nn.Parameter], watch: Watch) -> None:
    for p in params:
        p.grad = torch.randn_like(p)
        watch(p.grad)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[object]:
    return [value for state in optimizer.state.values() for value in state.values()]


def steps(kind: str) -> Callable[[Watch], Call]:
    """Steps the same parameters without a closure, with one, and with one that raises."""

    def routine(watch):
        cls, options = KINDS[kind]
        params = parameters()
        optimizer = cls(params, **options)
        closures = Turns([None, lambda: torch.zeros(()), interrupt])

        def call():
            give_gradients(params, watch)
            with contextlib.suppress(Interruption):
                optimizer.step(closures())
            optimizer.zero_grad()

        return call

    return routine


def saved(kind: str) -> Callable[[Watch], Call]:
    """Saves and loads state dicts of one optimizer, and tries one that it refuses."""

    def routine(watch):
        cls, options = KINDS[kind]
        params = parameters()
        optimizer = cls(params, **options)

        def call():
            give_gradients(params, watch)
            optimizer.step()
            for state_dict in (optimizer.state_dict(), optimizer.torch_state_dict()):
                optimizer.load_state_dict(copy.deepcopy(state_dict))
                watch(*tensors_of(optimizer))
            state_dict["param_groups"] = state_dict["param_groups"] * 2
            with contextlib.suppress(ValueError):
                optimizer.load_state_dict(state_dict)
                raise AssertionError("two groups for one were not refused")

        return call

    return routine


def life(kind: str) -> Callable[[Watch], Call]:
    """Makes, steps, copies, pickles and drops parameters and their optimizer."""

    def routine(watch):
        cls, options = KINDS[kind]

        def call():
            params = parameters()
            optimizer = cls(params, **options)
            give_gradients(params, watch)
            optimizer.step()
            file = io.BytesIO()
            torch.save(optimizer, file)
            file.seek(0)
            for copied in (copy.deepcopy(optimizer), torch.load(file, weights_only=False)):
                copied_params = [p for group in copied.param_groups for p in group["params"]]
                give_gradients(copied_params, watch)
                copied.step()
                watch(*copied_params, *tensors_of(copied))
            watch(*params, *tensors_of(optimizer))

        return call

    return routine


OPTIMIZERS = {
    f"{kind}: {name}": routine(kind)
    for kind in KINDS
    for name, routine in {"steps": steps, "state dicts": saved, "life": life}.items()
}
