"""The options that AdamW has beyond torch's, and what each may be."""

from typing import Any

from fusedops.functional.adamw import BLOCK
from fusedops.optim.adamw.state import DTYPES

__all__ = ["OURS", "check_options"]

# The options that a state's format follows from: the constructor's hold, whatever is loaded.
FORMAT = ("state_dtype", "block_size", "min_8bit_size", "stochastic_rounding", "master_weights")
SAME = ("max_grad_norm", "offload", "seed")  # in all groups
OURS = (*FORMAT, *SAME)


def check_options(options: dict[str, Any], of_all: dict[str, Any]) -> None:
    """Raises ValueError where an option of ours is not one that AdamW's docstring has, or where
    one that is of all groups differs in one."""
    seed, limit = options["seed"], options["max_grad_norm"]
    wanted = {
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
    for name, (fine, what) in wanted.items():
        if not fine:
            raise ValueError(f"AdamW: {name} must be {what}, got {options[name]!r}")
    for name in SAME:
        if options[name] != of_all[name]:
            raise ValueError(
                f"AdamW: {name} must be the same in all groups, {of_all[name]!r}, "
                f"got {options[name]!r}"
            )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
