"""Calls and modules for tests with another default dtype or device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from attention import cases as attention_cases
from cross_entropy import cases as cross_entropy_cases
from gated_activation import cases as gated_cases
from linear import cases as linear_cases
from norm import cases as norm_cases
from quantized_linear import cases as quantized_cases
from rotary import cases as rotary_cases
from torch import Tensor

import fusedops
from fusedops.functional import attention, rotary_embedding, scaled_dot_product_attention
from fusedops.functional.attention import attention_reference
from fusedops.functional.rotary import rotary_embedding_reference

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    """Within it, new tensors have another dtype and are on another device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


DEFAULTS = {"float64": {"dtype": F64}, "bfloat16": {"dtype": BF16}, "float16": {"dtype": F16}}
DEFAULTS |= {"meta": {"device": "meta"}, "cpu": {"device": "cpu"}}


@dataclass(frozen=True)
class Call:
    """An operator's function, its reference, and the arguments of both."""

    operator: str  # whose backends run it
    function: Callable
    reference: Callable
    args: tuple
    options: dict[str, Any] = field(default_factory=dict)
    draws: tuple[Callable, ...] = ()  # references that add in another order

    def to(self, dtype: torch.dtype) -> "Call":
        args = (a.to(dtype) if _floating(a) else a for a in self.args)
        return replace(self, args=tuple(args))


def _floating(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


def _norms() -> Iterator[tuple[str, Call]]:
    for op, functions in norm_cases.FUNCTIONS.items():
        args = norm_cases.inputs(op, (3, 33), F32)
        yield op, Call(op, *functions, args)
        if op.startswith("add"):
            yield f"{op} with dropout", Call(op, *functions, args, {"dropout_p": 0.3})


def _gated_activations() -> Iterator[tuple[str, Call]]:
    for kind, (function, reference, options) in gated_cases.KINDS.items():
        args = gated_cases.inputs((3, 33), F32)
        yield kind, Call(kind.split()[0], function, reference, args, options)


def _linears() -> Iterator[tuple[str, Call]]:
    functions = linear_cases.linear, linear_cases.linear_reference
    args = linear_cases.inputs((3, 16), 24, F32)
    for kind in linear_cases.KINDS:
        yield f"linear {kind}", Call("linear", *functions, args, {"activation": kind})


def _quantized_linears() -> Iterator[tuple[str, Call]]:
    args = quantized_cases.inputs((3, 64), 24, F32)
    for kind in quantized_cases.FORMATS:
        weight = quantized_cases.quantized(kind, quantized_cases.random_weight(24, 64))
        for input_format, compute in quantized_cases.PRECISIONS:
            options = {"input_format": input_format, "compute": compute}
            functions = quantized_cases.functions(weight, **options)
            name = f"quantized_linear {kind}, {input_format}, {compute}"
            yield name, Call("quantized_linear", *functions, args)


def _rotaries() -> Iterator[tuple[str, Call]]:
    q, k, *table = rotary_cases.inputs((4, 2), 5, 16)
    for interleaved in rotary_cases.LAYOUTS:
        functions = [
            rotary_cases.with_table(run, *table, interleaved=interleaved)
            for run in (rotary_embedding, rotary_embedding_reference)
        ]
        name = "rotary_embedding" + " interleaved" * interleaved
        yield name, Call("rotary_embedding", *functions, (q, k))


def _cross_entropies() -> Iterator[tuple[str, Call]]:
    args = cross_entropy_cases.logits(9, 17), cross_entropy_cases.targets(9, 17)
    weight = cross_entropy_cases.class_weight(17)
    functions = cross_entropy_cases.cross_entropy, cross_entropy_cases.cross_entropy_reference
    for kind, options in cross_entropy_cases.OPTIONS.items():
        yield f"cross_entropy {kind}", Call("cross_entropy", *functions, args, options)
        weighted = [_with_class_weight(run, weight) for run in functions]
        yield f"cross_entropy {kind}, weighted", Call("cross_entropy", *weighted, args, options)


def _linear_cross_entropies() -> Iterator[tuple[str, Call]]:
    functions = (
        cross_entropy_cases.linear_cross_entropy,
        cross_entropy_cases.linear_cross_entropy_reference,
    )
    x, weight, _ = cross_entropy_cases.head(9, 12, 17)
    args = x, weight, cross_entropy_cases.targets(9, 17)
    for kind, options in cross_entropy_cases.OPTIONS.items():
        name = f"linear_cross_entropy {kind}"
        yield name, Call("linear_cross_entropy", *functions, args, options)


def _with_class_weight(run: Callable, weight: Tensor) -> Callable:
    return lambda x, t, **options: run(x, t, cross_entropy_cases.in_dtype_of(x, weight), **options)


def _attentions() -> Iterator[tuple[str, Call]]:
    qkv = attention_cases.heads(2, 4, 2, 6, 7, 8)
    with_lse = partial(attention, return_lse=True)
    for name in attention_cases.FEATURES:
        options = attention_cases.options([name], 2, 4, 6, 7)
        references = _in_other_orders(attention_reference, qkv[0])
        call = Call("attention", with_lse, attention_reference, qkv, options, references)
        yield f"attention {name}", call
    sdpa = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    references = _in_other_orders(_causal_reference, qkv[0])
    call = Call("attention", sdpa, _causal_reference, qkv, draws=references)
    yield "scaled_dot_product_attention", call


def _causal_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, causal=True, top_left=True)[0]


def _in_other_orders(run: Callable, q: Tensor) -> tuple[Callable, ...]:
    return tuple(
        lambda q, k, v, order=order, **options: run(q[..., order], k[..., order], v, **options)
        for order in attention_cases.orders(q)
    )


FAMILIES = (_norms, _gated_activations, _linears, _quantized_linears, _rotaries)
FAMILIES += (_cross_entropies, _linear_cross_entropies, _attentions)
CALLS = {name: call for family in FAMILIES for name, call in family()}


def _modules() -> Iterator[tuple[str, Callable, tuple]]:
    """Name, constructor of device and dtype, inputs."""
    nn = fusedops.nn
    x, residual, *_ = norm_cases.inputs("add_layer_norm", (3, 33), F32)
    for kind in (nn.LayerNorm, nn.RMSNorm):
        yield kind.__name__, partial(kind, 33, eps=1e-6), (x,)
    for kind in (nn.AddLayerNorm, nn.AddRMSNorm):
        yield kind.__name__, partial(kind, 33, eps=1e-6), (x, residual)
    for kind in (nn.SwiGLU, nn.GEGLU):
        yield kind.__name__, lambda kind=kind, **to: kind(), (x, residual)
    x, *_ = quantized_cases.inputs((3, 64), 24, F32)
    yield "Linear", partial(nn.Linear, 64, 24, activation="gelu"), (x,)
    for kind, (format, options) in quantized_cases.FORMATS.items():
        make = partial(nn.QuantizedLinear, 64, 24, format=format, **options)
        yield f"QuantizedLinear {kind}", make, (x,)
    targets = cross_entropy_cases.targets(9, 17)
    logits = cross_entropy_cases.logits(9, 17), targets
    yield "CrossEntropyLoss", lambda **to: nn.CrossEntropyLoss(label_smoothing=0.1), logits
    head = partial(nn.LinearCrossEntropyLoss, 12, 17, bias=True)
    yield "LinearCrossEntropyLoss", head, (cross_entropy_cases.head(9, 12, 17)[0], targets)
    qkv = tuple(attention_cases.drawn(seed, 2, 5, 24) for seed in range(3))
    attend = partial(_WithoutWeights, 24, 4, batch_first=True)
    yield "MultiheadAttention", attend, qkv


class _WithoutWeights(fusedops.nn.MultiheadAttention):
    def forward(self, *qkv: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*qkv, need_weights=False)[0]


MODULES = {name: (make, inputs) for name, make, inputs in _modules()}


def of_module(name: str) -> Call:
    """A new module's forward as a function of its parameters and inputs; by the references too."""
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make(device="cpu", dtype=F32)
    names, parameters = zip(*module.named_parameters(), strict=True) if _has(module) else ((), ())

    def function(*args: Tensor) -> Any:
        own = dict(zip(names, args, strict=False))
        return torch.func.functional_call(module, own, args[len(names) :])

    def reference(*args: Tensor) -> Any:
        with fusedops.backend("reference"):
            return function(*args)

    return Call("linear", function, reference, (*parameters, *inputs))


def _has(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None
