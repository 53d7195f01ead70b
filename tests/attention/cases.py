"""Shared helpers for attention tests: arguments, options, comparison with the reference."""

from functools import partial
from itertools import chain, repeat

import pytest
import torch
from contract.interpreter import interpreted

import fusedops
from fusedops.references.attention import attention_reference
from fusedops.testing import backends, device_of, gradients, placed, poisoned, yardstick

F32 = torch.float32
BF16 = torch.bfloat16
BACKENDS = [name for name in backends("attention") if name != "reference"]
ON = pytest.mark.parametrize("backend", BACKENDS)

# bfloat16 as such, and as float32: whichever a CPU does by itself.
FLOATS = pytest.mark.parametrize(
    "dtype,products",
    [(F32, None), (torch.float16, None), (BF16, False), (BF16, True)],
    ids=str,
    indirect=["products"],
)
# What has kernels of its own.
TILES = pytest.mark.parametrize(
    "dtype,products", [(F32, None), (BF16, True)], ids=str, indirect=["products"]
)

# Features, each with and without which all others are tried. Tensors are made for a shape.
FEATURES = {
    "causal": lambda *_: {"causal": True},
    "window": lambda *_: {"window": (5, 3)},
    "softcap": lambda *_: {"softcap": 2.0},
    "sinks": lambda _, heads, *__: {"sinks": drawn(8, heads)},
    "mask": lambda *shape: {"bias": drawn(9, shape[0], 1, *shape[2:]) > -1},
    "bias": lambda *shape: {"bias": drawn(10, 1, *shape[1:])},
    "dropout": lambda *_: {"dropout_p": 0.3},
    "scale": lambda *_: {"scale": 0.3},
}


def runs(backend, dtype=F32, **_):
    """Whether Triton's interpreter rounds right, if it runs the case: it truncates bfloat16."""
    return not interpreted(backend) or dtype != torch.bfloat16


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(batch, q_heads, kv_heads, queries, keys, width, v_width=None, dtype=F32):
    """Returns q, k and v."""
    q = drawn(1, batch, queries, q_heads, width).transpose(1, 2)
    k = drawn(2, batch, keys, kv_heads, width).transpose(1, 2)
    v = drawn(3, batch, keys, kv_heads, width if v_width is None else v_width).transpose(1, 2)
    return tuple((t * 1.5).to(dtype) for t in (q, k, v))


def options(names, batch, q_heads, queries, keys):
    """Returns the keyword arguments for these features."""
    kwargs = {}
    for name in names:
        kwargs |= FEATURES[name](batch, q_heads, queries, keys)
    return kwargs


def compare(qkv, backend, **kwargs):
    """Checks out, lse and all gradients against the reference.

    The yardstick's rows are heads. Eager's roundings are drawn again with another order of the
    width, and of the keys if they may change places: where few numbers make up a result, eager's
    error is now and then almost none by chance.
    """
    tensors = {k: t for k, t in kwargs.items() if isinstance(t, torch.Tensor)}
    rest = {k: t for k, t in kwargs.items() if k not in tensors}
    if "bias" in tensors and tensors["bias"].is_floating_point():
        tensors["bias"] = tensors["bias"].to(qkv[0].dtype)
    args = on(backend, *qkv, *tensors.values())

    def judged(run, args, order=slice(None), keys=slice(None)):
        def called(q, k, v, *more):
            more = dict(zip(tensors, more, strict=True)) | rest
            if isinstance(keys, torch.Tensor) and more.pop("causal", False):
                more["bias"] = visible(q, k)[..., keys]
            elif isinstance(keys, torch.Tensor) and "bias" in more:
                more["bias"] = more["bias"].expand(*more["bias"].shape[:-1], len(keys))[..., keys]
            return run(q[..., order], k[..., keys, :][..., order], v[..., keys, :], **more)

        return gradients(called, args)

    with fusedops.backend(backend), poisoned():
        actual = judged(partial(fusedops.functional.attention, return_lse=True), args)
    wide = [t.double() if t.is_floating_point() else t for t in args]
    exact, eager = judged(attention_reference, wide), judged(attention_reference, args)
    for key, value in actual.items():
        assert value.dtype == eager[key].dtype and value.shape == eager[key].shape, key
    q, k, *_ = args
    free = set(kwargs) <= {"scale", "causal"} or set(kwargs) <= {"scale", "bias"}
    shuffled = orders(k.transpose(-1, -2)) if free else repeat(slice(None))
    pairs = zip(orders(q), shuffled, strict=False)
    others = (judged(attention_reference, args, order, keys) for order, keys in pairs)
    left = list(actual)
    for draw in chain([eager], others):
        wrong = {
            key: yardstick(*(by_heads(t) for t in (actual[key], draw[key], exact[key])))
            for key in left
        }
        left = [key for key in left if wrong[key]]
        if not left:
            return
    raise AssertionError({key: wrong[key] for key in left})


def visible(q, k):
    """The causal mask: which keys each query sees, bool [queries, keys]."""
    queries, keys = q.shape[-2], k.shape[-2]
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


def orders(q, count=24):
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        yield torch.randperm(q.shape[-1], generator=draw).to(q.device)


def by_heads(t):
    return t.flatten(-2) if t.dim() > 2 else t


def results(run, leaves, cotangents, **kwargs):
    """Returns out, lse and the leaves' gradients, detached."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    outputs = run(*leaves, **kwargs)
    return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, cotangents)


def on(backend, *tensors):
    return placed(tensors, device_of(backend))
