"""torch.optim.AdamW with fused steps and 8-bit state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from fusedops.functional.adamw import BLOCK, FLOATS
from fusedops.optim.adamw.offload import home
from fusedops.optim.adamw.plan import Plan
from fusedops.optim.adamw.shard import distributed
from fusedops.optim.adamw.state import DTYPES, STEP, flat, formatted, wide_moments

# The options that a state's format follows from: the constructor's hold, whatever is loaded.
FORMAT = ("state_dtype", "block_size", "min_8bit_size", "stochastic_rounding", "master_weights")
SAME = ("max_grad_norm", "offload", "seed")  # in all groups
OURS = (*FORMAT, *SAME)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one pass over memory: on a GPU one launch for all parameters.

        p = p (1 - lr weight_decay)
        m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
        p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    The arguments before state_dtype are torch's, in torch's order. float32, float16 and bfloat16
    parameters have kernels, with any strides; what these do not cover (sparse, complex, float64,
    differentiable, tensor betas, tensor subclasses) is stepped by torch's own lines. `foreach` and
    `fused` are accepted and make no difference where there are kernels.

    state_dtype: "float32", "bfloat16" or "int8" (a byte for each moment, and two float32 scales for
        256 elements). Tensors of fewer than min_8bit_size elements keep float32. Whatever was
        loaded, the state has the format that the constructor asked for.
    stochastic_rounding: of parameters of 16 bits, by default on: rounded to nearest, most updates
        are too small to move a bfloat16 at all. The random bits are a hash of the seed, the step,
        the parameter's number and the element: the same on every device and every replica.
    master_weights: "remainder" keeps the 16 bits that a bfloat16 parameter lacks, so that it is
        trained as float32 is. Then nothing is rounded by chance.
    max_grad_norm: clips the norm of all gradients as `clip_grad_norm_` does, within the step; what
        lies in p.grad stays. A norm that is not finite skips the step.
    offload: "cpu" keeps the state of a GPU's parameters in pinned memory of the host, also in state
        dicts. The CPU's kernel steps them in chunks, of which some are copied meanwhile. A step
        returns when the CPU is done and the copies back are queued, which the current stream waits
        for. Parameters are read from the GPU at each step. A CUDA graph cannot capture that:
        RuntimeError. The state of parameters on a CPU lies there in any case.
    seed: of the random bits; in the state dict.

    GradScaler's scale and found_inf are applied within the step. Without it, an element whose g^2
    is not finite keeps its p, m and v, and no other is touched. `state_dict()` of float32 states
    is torch.optim.AdamW's and loads there; `torch_state_dict()` is that of any format. Raises what
    torch.optim.AdamW raises, and ValueError for an option of ours that is not as above.
    Loshchilov and Hutter, arXiv:1711.05101; 8-bit state: Dettmers et al., arXiv:2110.02861.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str = "float32",
        block_size: int = BLOCK,
        min_8bit_size: int = 4096,
        stochastic_rounding: bool | None = None,
        master_weights: str | None = None,
        max_grad_norm: float | None = None,
        offload: str | None = None,
        seed: int = 0,
    ) -> None:
        self._plan: Plan | None = None
        self._ours = {
            "state_dtype": state_dtype,
            "block_size": block_size,
            "min_8bit_size": min_8bit_size,
            "stochastic_rounding": stochastic_rounding,
            "master_weights": master_weights,
            "max_grad_norm": max_grad_norm,
            "offload": offload,
            "seed": seed,
        }
        _check(self._ours, self._ours)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self.defaults |= self._ours
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            for name, value in self._ours.items():
                param_group.setdefault(name, value)
            _check({name: param_group[name] for name in self._ours}, self._ours)
        super().add_param_group(param_group)

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of all parameters that have gradients; returns what the closure returns."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plan is None or not self._plan.holds(self):
            self._plan = Plan(self)
        self._plan.run(self, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ours": self._ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None
        self._step_supports_amp_scaling = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of ours or torch.optim.AdamW's, or states of bitsandbytes or torchao.

        Moments come into the format that the constructor asked for; those that have it keep their
        bits. As 8-bit codes, moments that are not finite start anew. torch's own loading would
        give every state the parameter's dtype.
        """
        handles = [
            self.register_load_state_dict_pre_hook(_wrap),
            self.register_load_state_dict_post_hook(_unwrap, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def torch_state_dict(self) -> dict[str, Any]:
        """The state dict as torch.optim.AdamW has it: moments in float32, and its options alone."""
        found = self.state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        state = {
            i: {STEP: s[STEP], **_wide(s, params[i])} if params[i].dtype in FLOATS else s
            for i, s in found["state"].items()
        }
        groups = [
            {k: v for k, v in group.items() if k not in OURS} for group in found["param_groups"]
        ]
        return found | {"state": state, "param_groups": groups}


class AdamW8bit(AdamW):
    """`AdamW` with state_dtype="int8": 2.03 bytes of state a parameter instead of 8."""

    def __init__(self, params: ParamsT, *args: Any, state_dtype: str = "int8", **kwargs: Any):
        super().__init__(params, *args, state_dtype=state_dtype, **kwargs)


class _Kept:
    """A tensor of a state, out of reach of torch's loading."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _wrap(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        i: {k: _Kept(v) if isinstance(v, Tensor) and k != STEP else v for k, v in flat(s).items()}
        for i, s in state_dict["state"].items()
    }
    groups = [
        saved | {name: own[name] for name in OURS if name != "seed" or name not in saved}
        for saved, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=False)
    ]
    missing = state_dict["param_groups"][len(groups) :]
    return state_dict | {"state": state, "param_groups": [*groups, *missing]}


def _unwrap(optimizer: Optimizer) -> None:
    index = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state.get(p):
                state = {
                    k: v.tensor if isinstance(v, _Kept) else v
                    for k, v in optimizer.state[p].items()
                }
                optimizer.state[p] = formatted(state, home(p, group), group, index)
            index += 1


def _wide(state: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    m, v = (distributed(p, t, tuple(p.shape)) for t in wide_moments(state, p))
    rest = {k: state[k] for k in ("max_exp_avg_sq",) if k in state}
    return {"exp_avg": m, "exp_avg_sq": v, **rest}


def _check(options: dict[str, Any], of_all: dict[str, Any]) -> None:
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
