"""AdamW and AdamW8bit: torch.optim.AdamW with fused steps and optional 8-bit state."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable

from fusedops.functional.adamw import FLOATS
from fusedops.optim.adamw.loading import Prepared, prepare
from fusedops.optim.adamw.options import OURS, SINCE, check_options
from fusedops.optim.adamw.plan import StepPlan
from fusedops.optim.adamw.shard import distributed
from fusedops.optim.adamw.state import STEP, wide_moments
from fusedops.references.adamw import BLOCK


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one pass over memory; on a GPU, one launch for all parameters.

        p = p (1 - lr weight_decay)
        m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
        p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    The arguments before state_dtype are torch's, in torch's order. float32, float16 and bfloat16
    parameters have kernels, with any strides. torch's own code steps all others (sparse, complex,
    float64, differentiable, tensor betas, tensor subclasses, the negative bit). `foreach` and
    `fused` are accepted and have no effect if a kernel runs.

    state_dtype: "float32", "bfloat16" or "int8" (one byte per moment, plus two float32 scales per
        256 elements). Tensors with fewer than min_8bit_size elements keep float32. The state always
        has the constructor's format, even after loading another one. After `model.double()` or
        another change of dtype, the next step converts it as `load_state_dict` does.
    stochastic_rounding: for 16-bit parameters, on by default: with rounding to nearest, most
        updates are too small to change a bfloat16. The random bits are a hash of the seed, the
        step, the parameter's index and the element, so they are equal on every device and replica.
    master_weights: "remainder" stores the 16 bits that a bfloat16 parameter lacks, so that it
        trains like float32. The step then does not round stochastically.
    max_grad_norm: clips the norm of all gradients within the step, as `clip_grad_norm_` does, but
        leaves p.grad unchanged. If the norm is not finite, the step is skipped.
    offload: "cpu" keeps the state of GPU parameters in the host's pinned memory, in state dicts
        too. The CPU kernel steps them in chunks while other chunks are copied. A step returns when
        the CPU is done and the copies back are queued; the current stream waits for the copies.
        Each step reads the parameters from the GPU. Raises RuntimeError during CUDA graph capture.
        CPU parameters keep their state on the CPU.
    seed: seeds the random bits; stored in the state dict.

    The step applies GradScaler's scale and found_inf. Without a GradScaler, an element whose g^2 is
    not finite keeps its p, m and v, and other elements are updated. With float32 states,
    `state_dict()` is torch.optim.AdamW's and loads there; `torch_state_dict()` converts any format
    to it. Raises what torch.optim.AdamW raises, ValueError for an invalid option, and RuntimeError
    if a gradient's dtype is not its parameter's; then nothing has changed. Loshchilov and Hutter,
    arXiv:1711.05101; 8-bit state: Dettmers et al., arXiv:2110.02861.
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
        self._plan: StepPlan | None = None
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
        check_options(self._ours, self._ours)
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
            check_options(param_group, self._ours)
        super().add_param_group(param_group)

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have gradients; returns the closure's result."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            _graph_break(self)
        else:
            self._update()
        return loss

    def _update(self) -> None:
        if self._plan is None or not self._plan.holds(self):
            self._plan = StepPlan(self)
        self._plan.run(self, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ours": self._ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        states = state.get("state", {})
        for p, loaded in states.items():
            if isinstance(loaded, Prepared):
                states[p] = loaded.state
        super().__setstate__(state)
        self._plan = None
        self._step_supports_amp_scaling = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of fusedops or torch.optim.AdamW, or bitsandbytes' or torchao's
        states.

        Moments are converted to the constructor's format; moments that already have it keep their
        bits. A conversion to 8-bit codes replaces moments that are not finite with zeros. Blocks of
        codes whose scale is not finite become zeros too. Like torch's, it keeps the dict's tensors
        where it can. It copies tensors that share memory with one another or with a parameter.

        Raises ValueError with the parameter or group, the entry, the requirement and the value;
        then nothing has changed.
        """
        handle = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def torch_state_dict(self) -> dict[str, Any]:
        """The state dict in torch.optim.AdamW's format: float32 moments, torch's options only."""
        saved = self.state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        state = {
            i: {STEP: s[STEP], **_wide(s, params[i])} if params[i].dtype in FLOATS else s
            for i, s in saved["state"].items()
        }
        groups = [
            {k: v for k, v in group.items() if k not in (*OURS, SINCE)}
            for group in saved["param_groups"]
        ]
        return saved | {"state": state, "param_groups": groups}


class AdamW8bit(AdamW):
    """`AdamW` with state_dtype="int8": 2.03 bytes of state per parameter instead of 8.

    See `AdamW` for arguments, dtypes and errors. Dettmers et al., arXiv:2110.02861.
    """

    def __init__(self, params: ParamsT, *args: Any, state_dtype: str = "int8", **kwargs: Any):
        super().__init__(params, *args, state_dtype=state_dtype, **kwargs)


@_disable_dynamo  # torch.compiler.disable would import Dynamo, which takes a second
def _graph_break(optimizer: AdamW) -> None:
    """Runs a step that Dynamo does not trace, so that it stays one launch under torch.compile."""
    optimizer._update()


def _wide(state: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
    m, v = (distributed(p, t, tuple(p.shape)) for t in wide_moments(state, p))
    rest = {k: state[k] for k in ("max_exp_avg_sq",) if k in state}
    return {"exp_avg": m, "exp_avg_sq": v, **rest}
