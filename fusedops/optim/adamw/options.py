"""Checks AdamW's options, on construction and on load."""

import math
from typing import Any

from torch import Tensor

from fusedops.optim.adamw.check import described, number_of
from fusedops.optim.adamw.state import DTYPES
from fusedops.references.adamw import BLOCK

__all__ = ["OURS", "SINCE", "check_options", "check_torchs_options"]

# Options that decide a state's format. Loading keeps the constructor's values.
FORMAT = ("state_dtype", "block_size", "min_8bit_size", "stochastic_rounding", "master_weights")
SAME = ("max_grad_norm", "offload", "seed")  # must be equal in all groups
SINCE = "steps_since_betas"  # a group has it while its moments stem from other betas, too
OURS = (*FORMAT, *SAME)

LEAST_LR = -1e-12  # torch's LinearLR ends at -1e-20 instead of 0, by a rounding error
FLAGS = ("amsgrad", "maximize")
FLAGS_OR_NONE = ("foreach", "capturable", "differentiable", "fused")

Options = dict[str, Any]


def check_options(options: Options, shared: Options, operator: str = "AdamW") -> None:
    """Raises ValueError for an invalid fusedops option, or a shared one that differs in a group."""
    seed, limit = options["seed"], options["max_grad_norm"]
    requirements = {
        "state_dtype": (options["state_dtype"] in DTYPES, f"one of {', '.join(DTYPES)}"),
        "block_size": (options["block_size"] == BLOCK, f"{BLOCK}"),
        "min_8bit_size": (_whole(options["min_8bit_size"]), "an int of 0 or more"),
        "stochastic_rounding": (
            options["stochastic_rounding"] is None
            or isinstance(options["stochastic_rounding"], bool),
            "None, True or False",
        ),
        "master_weights": (options["master_weights"] in (None, "remainder"), "None or 'remainder'"),
        "max_grad_norm": (
            limit is None or (isinstance(limit, float | int) and limit > 0),
            "None or a number above 0",
        ),
        "offload": (options["offload"] in (None, "cpu"), "None or 'cpu'"),
        "seed": (_whole(seed) and seed < 2**63, "an int from 0 to 2^63 - 1"),
    }
    for name, (fits, what) in requirements.items():
        _require(fits, options, name, what, operator)
    for name in SAME:
        what = f"the same in all groups, {shared[name]!r}"
        _require(options[name] == shared[name], options, name, what, operator)


def check_torchs_options(group: Options, on_meta: bool, operator: str) -> None:
    """Raises ValueError if a step could not use torch's options in a loaded group.

    A missing flag is fine, because torch then sets its default. on_meta: whether numbers may be
    tensors on meta.
    """
    for name, least in (("lr", LEAST_LR), ("eps", 0.0), ("weight_decay", 0.0)):
        fits = least <= number_of(group.get(name), on_meta) < math.inf
        _require(fits, group, name, "a finite number of 0 or more", operator)
    betas = group.get("betas")
    fits = isinstance(betas, tuple | list) and len(betas) == 2
    fits = fits and all(0 <= number_of(beta, on_meta) < 1 for beta in betas or ())
    _require(fits, group, "betas", "two numbers of 0 or more and below 1", operator)
    for name in (*FLAGS, *FLAGS_OR_NONE):
        optional = name in FLAGS_OR_NONE
        fits = name not in group or _is_flag(group[name]) or (optional and group[name] is None)
        _require(fits, group, name, f"{'None, ' * optional}True or False", operator)
    tensors = any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))
    fits = not (tensors and group.get("foreach") and not group.get("capturable"))
    what = "None or False, because lr or betas are tensors and capturable is off"
    _require(fits, group, "foreach", what, operator)


def _require(fits: bool, options: Options, name: str, what: str, operator: str) -> None:
    if fits:
        return
    value = options.get(name)
    shown = described(value) if isinstance(value, Tensor) else repr(value)[:80]
    got = shown if name in options else "nothing"
    raise ValueError(f"{operator}: {name} must be {what}, got {got}")


def _is_flag(value: Any) -> bool:
    """Whether a value is True or False, or equals one, as 0, 1 and NumPy's bools do."""
    scalar = not isinstance(value, Tensor) and getattr(value, "ndim", 0) == 0
    return scalar and value in (True, False)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
