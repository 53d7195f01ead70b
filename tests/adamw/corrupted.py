"""Corrupted AdamW state dicts, each with the error that it must raise."""

import copy
import math
import re

import torch

from adamw.training import train
from fusedops.optim import AdamW
from fusedops.optim.adamw.state import SCALES

SHAPES = {"embed.weight": (5000,), "head.weight": (33, 7), "deep.weight": (16, 512)}
KINDS = {
    "float32": (torch.float32, {"amsgrad": True}),
    "bfloat16": (torch.float32, {"amsgrad": True, "state_dtype": "bfloat16"}),
    "int8": (torch.float32, {"amsgrad": True, "state_dtype": "int8"}),
    "remainder": (torch.bfloat16, {"state_dtype": "int8", "master_weights": "remainder"}),
    "float64": (torch.float64, {"amsgrad": True}),
    "complex": (torch.complex64, {"amsgrad": True}),
}


def optimizer_of(kind, named=True):
    """Returns an optimizer after some steps. Its last parameter has its own group."""
    dtype, options = KINDS[kind]
    draw = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(s, generator=draw).to(dtype).requires_grad_()
        for name, s in SHAPES.items()
    }
    listed = list(params.items()) if named else list(params.values())
    optimizer = AdamW([{"params": listed[:2]}, {"params": listed[2:], "lr": 1e-2}], **options)
    train(optimizer, 3)
    return optimizer


def with_a_state(kind, named=True):
    """Returns the optimizer, and a copy of its state dict."""
    optimizer = optimizer_of(kind, named)
    return optimizer, copy.deepcopy(optimizer.state_dict())


def entry(parameter, name, make):
    """Corrupts one entry of a parameter's state with `make`; None removes the entry."""

    def corrupt(state_dict):
        state = state_dict["state"][parameter] = dict(state_dict["state"][parameter])
        value = make(state.pop(name, None))
        if value is not None:
            state[name] = value

    return corrupt


def whole(parameter, state):
    """Replaces a parameter's whole state."""

    def corrupt(state_dict):
        state_dict["state"][parameter] = state

    return corrupt


def without_scales(state_dict):
    for name in SCALES:
        del state_dict["state"][0][name]


def option(group, name, value, **others):
    """Changes a group's options."""

    def corrupt(state_dict):
        state_dict["param_groups"][group] |= {name: value, **others}

    return corrupt


def nested(t):
    return torch.nested.nested_tensor([t], layout=torch.strided)


def jagged(t):
    return torch.nested.nested_tensor([t], layout=torch.jagged)


def gone(_):
    return None


def said(parameter, name, requirement, got):
    """Returns a pattern of the error about an entry of a parameter's state."""
    of = f"{parameter} ({[*SHAPES][parameter]})"
    return re.escape(f"{of}: {name} must be {requirement}, got {got}")


def wrong(kind, parameter, name, make, requirement, got):
    return kind, entry(parameter, name, make), said(parameter, name, requirement, got)


def wrong_option(kind, group, name, value, requirement, got, **others):
    said = re.escape(f"group {group}: {name} must be {requirement}, got {got}")
    return kind, option(group, name, value, **others), said


MOMENT, FLOATS, CODES = "floating-point or int8 [5000]", "floating-point [5000]", "uint8 [5000]"
TWENTY = "float32 [20]"
NUMBER = "a finite number of 0 or more"
BETAS = "two numbers of 0 or more and below 1"
FLAG = "True or False"
SEED = "an int from 0 to 2^63 - 1"
NO_FOREACH = "None or False, because lr or betas are tensors and capturable is off"
# Name: the optimizer, what is done to its state dict, and what the error says.
CORRUPTED = {
    "truncated floats": wrong("float32", 0, "exp_avg", lambda t: t[:4900],
        MOMENT, "float32 [4900]"),
    "as many floats in another shape": wrong("bfloat16", 2, "exp_avg", lambda t: t.view(512, 16),
        "floating-point or int8 [16, 512]", "bfloat16 [512, 16]"),
    "truncated codes": wrong("int8", 0, "exp_avg", lambda t: t[:4900], MOMENT, "int8 [4900]"),
    "ints": wrong("float32", 0, "exp_avg", lambda t: t.long(), MOMENT, "int64 [5000]"),
    "codes beside floats": wrong("int8", 0, "exp_avg_sq", lambda t: t.float(),
        CODES, "float32 [5000]"),
    "codes without scales": ("int8", without_scales, said(0, "exp_avg_scale", TWENTY, "nothing")),
    "one scale is missing": wrong("int8", 2, "exp_avg_sq_scale", gone, "float32 [32]", "nothing"),
    "more scales": wrong("int8", 0, "exp_avg_sq_scale", lambda t: torch.cat([t, t[:1]]),
        TWENTY, "float32 [21]"),
    "scales of 16 bits": wrong("int8", 0, "exp_avg_scale", lambda t: t.half(),
        TWENTY, "float16 [20]"),
    "a scale that is a number": wrong("int8", 0, "exp_avg_scale", lambda t: 0.5, TWENTY, "0.5"),
    "no exp_avg": wrong("float32", 0, "exp_avg", gone, MOMENT, "nothing"),
    "no step": wrong("float32", 0, "step", gone, NUMBER, "nothing"),
    "a step below 0": wrong("float32", 2, "step", lambda t: torch.tensor(-1.0),
        NUMBER, "float32 [] of -1.0"),
    "a step that is NaN": wrong("int8", 0, "step", lambda t: torch.tensor(math.nan),
        NUMBER, "float32 [] of nan"),
    "two steps": wrong("float32", 0, "step", lambda t: torch.ones(2), NUMBER, "float32 [2]"),
    "a step in words": wrong("float32", 0, "step", lambda t: "three", NUMBER, "'three'"),
    "a moment in words": wrong("float32", 0, "exp_avg", lambda t: "zeros", MOMENT, "'zeros'"),
    "a complex moment": wrong("float32", 0, "exp_avg", lambda t: t.to(torch.complex64),
        MOMENT, "complex64 [5000]"),
    "a sparse moment": wrong("float32", 0, "exp_avg", lambda t: t.to_sparse(),
        MOMENT, "sparse_coo float32 [5000]"),
    "a moment without numbers": wrong("float32", 0, "exp_avg", lambda t: t.to("meta"),
        MOMENT, "float32 [5000] on meta"),
    "a truncated maximum": wrong("float32", 0, "max_exp_avg_sq", lambda t: t[1:],
        FLOATS, "float32 [4999]"),
    "a truncated remainder": wrong("remainder", 1, "remainder", lambda t: t[:, :6],
        "int16 [33, 7]", "int16 [33, 6]"),
    "a state in words": ("float32", whole(0, "state"), r"its state must be a dict, got 'state'"),
    "bitsandbytes without a map": (
        "int8", whole(0, {"step": 1, "state1": torch.zeros(5000).byte()}),
        r"0 \(embed.weight\): qmap1 must be floating-point \[256\], got nothing",
    ),
    "bitsandbytes with too few scales": (
        "int8",
        whole(0, {
            "step": 1,
            "state1": torch.zeros(5000).byte(),
            "qmap1": torch.ones(256),
            "absmax1": torch.ones(19),
        }),
        r"absmax1 must be floating-point \[10\], got float32 \[19\]",
    ),
    "what bitsandbytes hides is no dict": (
        "int8", whole(0, {"step": 1, "__bnb_optimizer_quant_state__": 5}),
        r"__bnb_optimizer_quant_state__ must be a dict, got 5",
    ),
    "torch's own step: truncated": wrong("float64", 0, "exp_avg", lambda t: t[:4900],
        MOMENT, "float64 [4900]"),
    "torch's own step: real numbers": wrong("complex", 0, "exp_avg", lambda t: t.real,
        "complex or int8 [5000]", "float32 [5000]"),
    "a strided nested moment": wrong("float32", 0, "exp_avg", nested, MOMENT, "nested float32"),
    "a jagged nested maximum": wrong("float32", 0, "max_exp_avg_sq", jagged,
        FLOATS, "nested float32"),
    "a list of states": (
        "float32", lambda s: s.update(state=[]), r"state must be a dict, got list",
    ),
    "a group without betas": (
        "float32", lambda s: s["param_groups"][1].pop("betas"),
        f"group 1: betas must be {BETAS}, got nothing",
    ),
    "a beta of 2": wrong_option("float32", 1, "betas", (0.9, 2.0), BETAS, "(0.9, 2.0)"),
    "a beta that is NaN": wrong_option("float32", 0, "betas", (math.nan, 0.9), BETAS, "(nan, 0.9)"),
    "a beta of two elements": wrong_option("float32", 0, "betas", [torch.tensor([0.9, 0.1]), 0.9],
        BETAS, "[tensor([0.9000, 0.1000]), 0.9]"),
    "a learning rate in words": wrong_option("float32", 1, "lr", "fast", NUMBER, "'fast'"),
    "a learning rate that is NaN": wrong_option("int8", 1, "lr", math.nan, NUMBER, "nan"),
    "a learning rate below 0": wrong_option("int8", 0, "lr", -0.1, NUMBER, "-0.1"),
    "a learning rate of NaN in a tensor": wrong_option("float32", 0, "lr", torch.tensor(math.nan),
        NUMBER, "float32 [] of nan"),
    "two learning rates": wrong_option("float32", 0, "lr", torch.tensor([1.0, 2.0]),
        NUMBER, "float32 [2]"),
    "a complex learning rate": wrong_option(
        "float32", 0, "lr", torch.ones(1, dtype=torch.complex64), NUMBER, "complex64 [1] of"),
    "a learning rate on meta": wrong_option("float32", 0, "lr", torch.tensor(0.1, device="meta"),
        NUMBER, "float32 [] on meta"),
    "an eps below 0": wrong_option("float32", 1, "eps", -1.0, NUMBER, "-1.0"),
    "a weight decay of None": wrong_option("float32", 0, "weight_decay", None, NUMBER, "None"),
    "amsgrad in words": wrong_option("float32", 1, "amsgrad", "yes", FLAG, "'yes'"),
    "amsgrad of 2": wrong_option("int8", 0, "amsgrad", 2, FLAG, "2"),
    "maximize in words": wrong_option("float32", 1, "maximize", "x", FLAG, "'x'"),
    "foreach in words": wrong_option("float64", 0, "foreach", "q", "None, True or False", "'q'"),
    "foreach with a tensor": wrong_option("float64", 1, "foreach", True,
        NO_FOREACH, "True", lr=torch.tensor(0.1)),
    "another seed in one group": wrong_option("float32", 1, "seed", 5,
        "the same in all groups, 0", "5"),
    "a seed below 0": wrong_option("float32", 1, "seed", -1, SEED, "-1"),
}  # fmt: skip
