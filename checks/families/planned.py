"""Checks `fusedops.memory` of one model family against a training step that is measured.

`python -m checks families --memory`. The config and the batch are those of the check of `patch`;
the config's `pad_token_id` is 0, and then None. Memory inside an operator's call is not planned, so
the peak is reported and not judged.
"""

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from checks.families.judge import CRASHED, RIGHT, UNKNOWN, WRONG, Row, first_that_runs, said
from fusedops import memory
from fusedops.measuring.memory import measure_memory
from fusedops.profiling.planning.step import loss_of

__all__ = ["judge_memory"]

PADS = 0, None
EXACT = "parameters", "frozen", "buffers", "gradients", "optimizer_state"
CLOSE = "logits", "activations"
OFF, LEAST = 0.1, 1 << 15  # of a measured number, and bytes
SEVERITY = RIGHT, UNKNOWN, WRONG, CRASHED


def judge_memory(kind: str, family: str) -> Row:
    """Returns the family's row: "right" if every plan is. Raises what the model raises."""
    start, row = time.perf_counter(), {"kind": kind, "family": family}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = first_that_runs(kind, family)
        if isinstance(runs, dict):
            row |= runs
        else:
            plans = {pad: _judged(*runs[:2], pad) for pad in PADS}
            row["plans"] = {str(pad): why for pad, (_, why) in plans.items()}
            pad = max(plans, key=lambda pad: SEVERITY.index(plans[pad][0]))
            row |= {"verdict": plans[pad][0], "why": f"pad_token_id={pad}: {plans[pad][1]}"}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _judged(model: Any, batch: dict[str, Any], pad: int | None) -> tuple[str, str]:
    """The verdict on a plan, and its reason or how far the peak is off."""
    config = _config(model, pad)
    plan, refusal = _attempt(lambda: memory(config, batch=batch, dtype=torch.float32))
    use, error = _attempt(lambda: _measured(type(model), config, batch))
    if refusal is not None and not str(refusal).startswith("memory: "):
        return CRASHED, said(refusal)
    if refusal is not None and error is None:
        return (UNKNOWN if "needs the numbers" in str(refusal) else CRASHED), said(refusal)
    if error is not None:
        return RIGHT, f"{'planned, and ' if plan else ''}the model itself raises {said(error)}"
    both = {name: (getattr(plan, name), getattr(use, name)) for name in (*EXACT, *CLOSE)}
    wrong = [f"{n} {a:,} for {b:,}" for n, (a, b) in both.items() if not _agree(n, a, b)]
    return (WRONG, "; ".join(wrong)) if wrong else (RIGHT, f"peak {plan.peak / use.peak - 1:+.1%}")


def _config(model: Any, pad: int | None) -> Any:
    """The model's config, with transformers' default experts and without layer dropout."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config._experts_implementation = None
    for part in (config, *vars(config).values()):
        if hasattr(type(part), "model_type"):
            attributes = vars(part)  # past a config that asks for a number
            attributes |= {name: 0.0 for name in attributes if name.endswith("layerdrop")}
            attributes |= {"pad_token_id": pad} if "pad_token_id" in attributes else {}
    return config


def _agree(name: str, planned: int, measured: int) -> bool:
    return abs(planned - measured) <= (0 if name in EXACT else max(OFF * measured, LEAST))


def _measured(cls: Any, config: Any, batch: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    return measure_memory(step, model=model, optimizer=optimizer)


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        return None, error
