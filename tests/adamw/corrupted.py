"""Corrupted AdamW state dicts, each with the error that it must raise."""

import math

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


def nested(t, layout):
    return torch.nested.nested_tensor([t], layout=layout)


def gone(_):
    return None


FLOATS = r"floating-point or int8 \[5000\]"
NUMBER = "must be a finite number of 0 or more"
BETAS = "must be two numbers of 0 or more and below 1"
FLAG = "must be True or False"
# Name: the optimizer, what is done to its state dict, and what the error says of parameter 0, of
# the last one, or of a group.
CORRUPTED = {
    "truncated floats": (
        "float32", entry(0, "exp_avg", lambda t: t[:4900]),
        rf"0 \(embed.weight\): exp_avg must be {FLOATS}, got float32 \[4900\]",
    ),
    "extended floats": (
        "float32", entry(0, "exp_avg_sq", lambda t: torch.cat([t, t])),
        r"0 \(embed.weight\): exp_avg_sq must be floating-point \[5000\], got float32 \[10000\]",
    ),
    "as many floats in another shape": (
        "bfloat16", entry(2, "exp_avg", lambda t: t.view(512, 16)),
        r"2 \(deep.weight\): exp_avg must be floating-point or int8 \[16, 512\], "
        r"got bfloat16 \[512, 16\]",
    ),
    "truncated codes": (
        "int8", entry(0, "exp_avg", lambda t: t[:4900]),
        rf"0 \(embed.weight\): exp_avg must be {FLOATS}, got int8 \[4900\]",
    ),
    "truncated codes of squares": (
        "int8", entry(0, "exp_avg_sq", lambda t: t[:4900]),
        r"0 \(embed.weight\): exp_avg_sq must be uint8 \[5000\], got uint8 \[4900\]",
    ),
    "extended codes": (
        "int8", entry(2, "exp_avg", lambda t: torch.cat([t, t])),
        r"2 \(deep.weight\): exp_avg must be floating-point or int8 \[16, 512\], "
        r"got int8 \[32, 512\]",
    ),
    "ints": (
        "float32", entry(0, "exp_avg", lambda t: t.long()),
        rf"0 \(embed.weight\): exp_avg must be {FLOATS}, got int64 \[5000\]",
    ),
    "bools": (
        "float32", entry(0, "exp_avg_sq", lambda t: t.bool()),
        r"exp_avg_sq must be floating-point \[5000\], got bool \[5000\]",
    ),
    "codes of squares in int8": (
        "int8", entry(0, "exp_avg_sq", lambda t: t.view(torch.int8)),
        r"exp_avg_sq must be uint8 \[5000\], got int8 \[5000\]",
    ),
    "codes beside floats": (
        "int8", entry(0, "exp_avg_sq", lambda t: t.float()),
        r"exp_avg_sq must be uint8 \[5000\], got float32 \[5000\]",
    ),
    "codes without scales": (
        "int8", without_scales,
        r"0 \(embed.weight\): exp_avg_scale must be float32 \[20\], got nothing",
    ),
    "one scale is missing": (
        "int8", entry(2, "exp_avg_sq_scale", gone),
        r"2 \(deep.weight\): exp_avg_sq_scale must be float32 \[32\], got nothing",
    ),
    "fewer scales": (
        "int8", entry(0, "exp_avg_scale", lambda t: t[:19]),
        r"exp_avg_scale must be float32 \[20\], got float32 \[19\]",
    ),
    "more scales": (
        "int8", entry(0, "exp_avg_sq_scale", lambda t: torch.cat([t, t[:1]])),
        r"exp_avg_sq_scale must be float32 \[20\], got float32 \[21\]",
    ),
    "scales of 16 bits": (
        "int8", entry(0, "exp_avg_scale", lambda t: t.half()),
        r"exp_avg_scale must be float32 \[20\], got float16 \[20\]",
    ),
    "a scale that is a number": (
        "int8", entry(0, "exp_avg_scale", lambda t: 0.5),
        r"exp_avg_scale must be float32 \[20\], got 0.5",
    ),
    "no exp_avg": (
        "float32", entry(0, "exp_avg", gone), rf"exp_avg must be {FLOATS}, got nothing",
    ),
    "no exp_avg_sq": (
        "int8", entry(0, "exp_avg_sq", gone),
        r"exp_avg_sq must be uint8 \[5000\], got nothing",
    ),
    "no step": (
        "float32", entry(0, "step", gone),
        r"0 \(embed.weight\): step must be a finite number of 0 or more, got nothing",
    ),
    "a step below 0": (
        "float32", entry(2, "step", lambda t: torch.tensor(-1.0)),
        r"2 \(deep.weight\): step must be .*, got float32 \[\] of -1.0",
    ),
    "a step that is NaN": (
        "int8", entry(0, "step", lambda t: torch.tensor(math.nan)),
        r"step must be .*, got float32 \[\] of nan",
    ),
    "an infinite step": ("float32", entry(0, "step", lambda t: math.inf), r"step .*, got inf"),
    "two steps": (
        "float32", entry(0, "step", lambda t: torch.ones(2)), r"step .*, got float32 \[2\]",
    ),
    "a complex step": (
        "float32", entry(0, "step", lambda t: torch.tensor(1j)),
        r"step must be .*, got complex64 \[\] of 1j",
    ),
    "a step in words": ("float32", entry(0, "step", lambda t: "three"), r"step .*, got 'three'"),
    "a moment in words": (
        "float32", entry(0, "exp_avg", lambda t: "zeros"),
        rf"exp_avg must be {FLOATS}, got 'zeros'",
    ),
    "a list of numbers": (
        "float32", entry(0, "exp_avg", lambda t: t.tolist()),
        rf"exp_avg must be {FLOATS}, got list",
    ),
    "a complex moment": (
        "float32", entry(0, "exp_avg", lambda t: t.to(torch.complex64)),
        rf"exp_avg must be {FLOATS}, got complex64 \[5000\]",
    ),
    "a sparse moment": (
        "float32", entry(0, "exp_avg", lambda t: t.to_sparse()),
        rf"exp_avg must be {FLOATS}, got sparse_coo float32 \[5000\]",
    ),
    "a moment without numbers": (
        "float32", entry(0, "exp_avg", lambda t: t.to("meta")),
        rf"exp_avg must be {FLOATS}, got float32 \[5000\] on meta",
    ),
    "a truncated maximum": (
        "float32", entry(0, "max_exp_avg_sq", lambda t: t[1:]),
        r"max_exp_avg_sq must be floating-point \[5000\], got float32 \[4999\]",
    ),
    "a maximum of ints": (
        "int8", entry(2, "max_exp_avg_sq", lambda t: t.int()),
        r"2 \(deep.weight\): max_exp_avg_sq must be floating-point \[16, 512\], "
        r"got int32 \[16, 512\]",
    ),
    "a truncated remainder": (
        "remainder", entry(1, "remainder", lambda t: t[:, :6]),
        r"1 \(head.weight\): remainder must be int16 \[33, 7\], got int16 \[33, 6\]",
    ),
    "a remainder of floats": (
        "remainder", entry(0, "remainder", lambda t: t.float()),
        r"remainder must be int16 \[5000\], got float32 \[5000\]",
    ),
    "a state in words": ("float32", whole(0, "state"), r"its state must be a dict, got 'state'"),
    "a state of None": ("int8", whole(2, None), r"2 \(deep.weight\): its state must be a dict"),
    "a state of a tensor": (
        "float32", whole(0, torch.ones(3)), r"its state must be a dict, got float32 \[3\]",
    ),
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
    "bitsandbytes without its second state": (
        "int8", whole(0, {"step": 1, "state1": torch.zeros(5000)}),
        r"state2 must be floating-point or uint8 \[5000\], got nothing",
    ),
    "what bitsandbytes hides is no dict": (
        "int8", whole(0, {"step": 1, "__bnb_optimizer_quant_state__": 5}),
        r"__bnb_optimizer_quant_state__ must be a dict, got 5",
    ),
    "torch's own step: truncated": (
        "float64", entry(0, "exp_avg", lambda t: t[:4900]),
        rf"exp_avg must be {FLOATS}, got float64 \[4900\]",
    ),
    "torch's own step: a maximum": (
        "float64", entry(0, "max_exp_avg_sq", lambda t: t[:4900]),
        r"max_exp_avg_sq must be floating-point \[5000\], got float64 \[4900\]",
    ),
    "torch's own step: real numbers": (
        "complex", entry(0, "exp_avg", lambda t: t.real),
        r"exp_avg must be complex or int8 \[5000\], got float32 \[5000\]",
    ),
    "a strided nested moment": (
        "float32", entry(0, "exp_avg", lambda t: nested(t, torch.strided)),
        rf"exp_avg must be {FLOATS}, got nested float32",
    ),
    "a jagged nested maximum": (
        "float32", entry(0, "max_exp_avg_sq", lambda t: nested(t, torch.jagged)),
        r"max_exp_avg_sq must be floating-point \[5000\], got nested float32",
    ),
    "a nested scale": (
        "int8", entry(0, "exp_avg_scale", lambda t: nested(t, torch.strided)),
        r"exp_avg_scale must be float32 \[20\], got nested float32",
    ),
    "a nested step": (
        "float32", entry(2, "step", lambda t: nested(t.reshape(1), torch.strided)),
        r"2 \(deep.weight\): step must be .*, got nested float32",
    ),
    "torch's own step: nested": (
        "float64", entry(0, "exp_avg_sq", lambda t: nested(t, torch.strided)),
        r"exp_avg_sq must be floating-point \[5000\], got nested float64",
    ),
    "a list of states": (
        "float32", lambda s: s.update(state=[]), r"state must be a dict, got list",
    ),
    "a group without betas": (
        "float32", lambda s: s["param_groups"][1].pop("betas"),
        rf"group 1: betas {BETAS}, got nothing",
    ),
    "one beta": ("float32", option(0, "betas", (0.9,)), rf"group 0: betas {BETAS}, got \(0.9,\)"),
    "a beta of 2": (
        "float32", option(1, "betas", (0.9, 2.0)), rf"group 1: betas {BETAS}, got \(0.9, 2.0\)",
    ),
    "a beta of 1": ("int8", option(0, "betas", (1.0, 0.9)), rf"group 0: betas {BETAS}, got \(1.0,"),
    "a beta below 0": ("int8", option(0, "betas", (0.9, -0.1)), rf"group 0: betas {BETAS}, got"),
    "a beta that is NaN": (
        "float32", option(0, "betas", (math.nan, 0.9)), rf"betas {BETAS}, got \(nan, 0.9\)",
    ),
    "a beta of two elements": (
        "float32", option(0, "betas", [torch.tensor([0.9, 0.1]), 0.9]),
        rf"group 0: betas {BETAS}, got \[tensor\(\[0.9000, 0.1000\]\), 0.9\]",
    ),
    "a complex beta": (
        "float64", option(0, "betas", (torch.tensor(0.9 + 0j), torch.tensor(0.9))),
        rf"group 0: betas {BETAS}, got \(tensor",
    ),
    "betas in one tensor": (
        "float32", option(0, "betas", torch.tensor([0.9, 0.99])),
        rf"group 0: betas {BETAS}, got float32 \[2\]",
    ),
    "a learning rate in words": (
        "float32", option(1, "lr", "fast"), rf"group 1: lr {NUMBER}, got 'fast'",
    ),
    "a learning rate of None": ("float32", option(1, "lr", None), rf"lr {NUMBER}, got None"),
    "a learning rate that is NaN": (
        "int8", option(1, "lr", math.nan), rf"group 1: lr {NUMBER}, got nan",
    ),
    "a learning rate that is infinite": (
        "int8", option(1, "lr", math.inf), rf"group 1: lr {NUMBER}, got inf",
    ),
    "a learning rate below 0": ("int8", option(0, "lr", -0.1), rf"group 0: lr {NUMBER}, got -0.1"),
    "a learning rate of NaN in a tensor": (
        "float32", option(0, "lr", torch.tensor(math.nan)),
        rf"group 0: lr {NUMBER}, got float32 \[\] of nan",
    ),
    "two learning rates": (
        "float32", option(0, "lr", torch.tensor([1.0, 2.0])),
        rf"group 0: lr {NUMBER}, got float32 \[2\]",
    ),
    "no learning rate in a tensor": (
        "float32", option(0, "lr", torch.empty(0)), rf"group 0: lr {NUMBER}, got float32 \[0\]",
    ),
    "a complex learning rate": (
        "float32", option(0, "lr", torch.ones(1, dtype=torch.complex64)),
        rf"group 0: lr {NUMBER}, got complex64 \[1\] of",
    ),
    "a learning rate on meta": (
        "float32", option(0, "lr", torch.tensor(0.1, device="meta")),
        rf"group 0: lr {NUMBER}, got float32 \[\] on meta",
    ),
    "an eps of two elements": (
        "bfloat16", option(1, "eps", torch.tensor([1e-8, 1.0])),
        rf"group 1: eps {NUMBER}, got float32 \[2\]",
    ),
    "an eps below 0": ("float32", option(1, "eps", -1.0), rf"group 1: eps {NUMBER}, got -1.0"),
    "a weight decay below 0": (
        "float32", option(0, "weight_decay", -0.1), rf"weight_decay {NUMBER}, got -0.1",
    ),
    "a weight decay of None": (
        "float32", option(0, "weight_decay", None), rf"weight_decay {NUMBER}, got None",
    ),
    "amsgrad in words": (
        "float32", option(1, "amsgrad", "yes"), rf"group 1: amsgrad {FLAG}, got 'yes'",
    ),
    "amsgrad of None": ("int8", option(0, "amsgrad", None), rf"group 0: amsgrad {FLAG}, got None"),
    "amsgrad of 2": ("int8", option(0, "amsgrad", 2), rf"group 0: amsgrad {FLAG}, got 2"),
    "maximize in words": (
        "float32", option(1, "maximize", "x"), rf"group 1: maximize {FLAG}, got 'x'",
    ),
    "maximize of None": (
        "float64", option(0, "maximize", None), rf"group 0: maximize {FLAG}, got None",
    ),
    "maximize in a list": (
        "int8", option(0, "maximize", [True]), rf"group 0: maximize {FLAG}, got \[True\]",
    ),
    "foreach in words": (
        "float64", option(0, "foreach", "q"),
        r"group 0: foreach must be None, True or False, got 'q'",
    ),
    "foreach with a tensor": (
        "float64", option(1, "foreach", True, lr=torch.tensor(0.1)),
        r"group 1: foreach must be None or False, .*, got True",
    ),
    "another seed in one group": (
        "float32", option(1, "seed", 5), r"group 1: seed must be the same in all groups, 0, got 5",
    ),
    "a seed in words": (
        "float32", option(0, "seed", "5"), r"group 0: seed must be an int .*, got '5'",
    ),
    "a seed below 0": (
        "float32", option(1, "seed", -1), r"group 1: seed must be an int .*, got -1",
    ),
}  # fmt: skip
