"""Runs a model before and after patch, and compares outputs, loss and gradients."""

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda

from fusedops.patching.core.swap import original

__all__ = ["GRADIENT", "Batch", "Yardstick", "call", "fresh", "objective", "run"]

GRADIENT = "gradient of "
MOVED, MORE = 3, 16  # perturbed copies
Batch = Mapping[str, object] | Sequence[object] | Tensor
Results = Callable[[nn.Module, Batch], dict[str, Tensor]]


class Yardstick:
    """A model's results for `batch` before patch, and how far rounding can move them.

    exact comes from a float64 copy of the model, or from the model itself if it cannot run in
    float64. Rounding is sampled several times, since one run may be right by luck: in the model,
    and in copies whose parameters are moved by half an ulp. After patch, a result may be off by
    twice the largest of these errors plus one ulp, |fused - exact| <= 2 max |seen - exact| + eps
    |exact|, in max norm and in RMS norm, for each output, the loss and each gradient. A gradient
    that cancels to zero (a key's bias, which softmax ignores) is all rounding; it may also be off
    by one ulp of the model's typical gradient. Positions that attention_mask hides are ignored.
    Dropout is off in all runs; the random state, the modules' modes and the gradients are
    unchanged.

    results: computes what to compare, `run` by default.
    """

    def __init__(self, model: nn.Module, batch: Batch, results: Results | None = None) -> None:
        self.batch, self.results = batch, results or run
        with original(model):
            self.eager = self.results(model, batch)
            self.seen = [self.eager, *self._moved(model, range(MOVED))]
            self.exact = self._exact(model) or self.eager
        gradients = [t.double() for n, t in self.exact.items() if n.startswith(GRADIENT)]
        squares = sum(float(t.square().sum()) for t in gradients)
        self.typical = (squares / max(1, sum(t.numel() for t in gradients))) ** 0.5

    def compare(self, model: nn.Module) -> None:
        """Raises RuntimeError if the patched model is off by more than rounding allows."""
        fused = self.results(model, self.batch)
        off = self.off(fused, model)
        outputs = run(model, self.batch, gradients=False)
        off += self.off(outputs, model, gradients=False)
        if off := list(dict.fromkeys(off)):
            raise RuntimeError(
                f"patch: verify found differences beyond rounding in {', '.join(off[:8])}"
                f" ({len(off)} of {len(fused)} results); the model was restored"
            )

    def off(self, fused: dict[str, Tensor], model: nn.Module, gradients: bool = True) -> list[str]:
        """The names of results that are missing or off by more than rounding allows.

        gradients: whether to check gradients. If a result is off, rounding is sampled in more
        copies before it is reported: a few copies may all be right by luck, for example to the last
        bit of a loss over few tokens.
        """
        names = [n for n in self.exact if gradients or not n.startswith(GRADIENT)]
        off = self._off(fused, names)
        if off and len(self.seen) <= MORE:
            with original(model):
                self.seen += self._moved(model, range(MOVED, MOVED + MORE))
            off = self._off(fused, names)
        return off

    def _off(self, fused: dict[str, Tensor], names: Iterable[str]) -> list[str]:
        return [n for n in names if n not in fused or not self.within(n, fused[n])]

    def _moved(self, model: nn.Module, seeds: Iterable[int]) -> list[dict[str, Tensor]]:
        return [self.results(_moved(model, seed), self.batch) for seed in seeds]

    def within(self, name: str, fused: Tensor) -> bool:
        """Whether one result is as close to the exact one as rounding allows."""
        if not torch.equal(_infinities(fused), _infinities(self.eager[name])):
            return False
        exact, eps = self.exact[name], torch.finfo(fused.dtype).eps
        ulp = _finite(exact).abs() + (self.typical if name.startswith(GRADIENT) else 0.0)
        off = [_error(result, exact) for result in (fused, *(seen[name] for seen in self.seen))]
        return all(
            norm(off[0]) <= 2 * max(map(norm, off[1:])) + eps * norm(ulp)
            for norm in (_largest, torch.linalg.vector_norm)
        )

    def _exact(self, model: nn.Module) -> dict[str, Tensor] | None:
        try:
            with _plain_sdpa():
                exact = self.results(_copy(model).double(), _double(self.batch))
        except RuntimeError:  # no float64: grouped matmuls, old models' masks
            return None
        # float64's smallest number in a mask becomes -inf in a float32 softmax.
        both = ((t, self.eager[n]) for n, t in exact.items() if n in self.eager)
        broken = any(t.isnan().any() > eager.isnan().any() for t, eager in both)
        return None if broken else exact


@contextmanager
def _plain_sdpa() -> Iterator[None]:
    """Switches sdpa's flash kernel off, also on CPUs.

    There, in torch 2.13, its gradients are wrong for queries that see no key.
    """
    flash, math = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
    try:
        cuda.enable_flash_sdp(False)
        cuda.enable_math_sdp(True)
        yield
    finally:
        cuda.enable_flash_sdp(flash)
        cuda.enable_math_sdp(math)


def _copy(model: nn.Module) -> nn.Module:
    """A deepcopy, including tensors that a module keeps from its last run (RecurrentGemma)."""
    kept = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in kept if not t.is_leaf})


def _moved(model: nn.Module, seed: int) -> nn.Module:
    """A copy with every parameter moved half an ulp up or down."""
    new, draws = _copy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in new.parameters():
            sign = torch.randint(2, p.shape, generator=draws, device="cpu").to(p) * 2 - 1
            p.mul_(1 + sign * torch.finfo(p.dtype).eps / 2)
    return new


def run(
    model: nn.Module,
    batch: Batch,
    gradients: bool = True,
    only: Container[str] | None = None,
) -> dict[str, Tensor]:
    """Outputs, loss and gradients by name, from one run without dropout.

    only: the names of the outputs that count; by default all.
    """
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), _in_eval_mode(model), torch.set_grad_enabled(gradients):
        output = call(model, fresh(batch))
        results = dict(_tensors("output", output))
        if only is not None:
            results = {name: t for name, t in results.items() if name in only}
        results = {name: _shown(t, model, batch) for name, t in results.items()}
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not results and getattr(output, "loss", None) is None:
            raise ValueError("patch: verify needs a model that gives floating-point results")
        loss = _loss(output, results)
        if named and loss.requires_grad:  # False if everything is frozen
            grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            named_grads = zip(named, grads, strict=True)
            results |= {GRADIENT + n: g for n, g in named_grads if g is not None}
    return {name: t.detach() for name, t in results.items()}


def call(model: nn.Module, batch: Any) -> Any:
    """The model's outputs: a dict is its keyword arguments, a tuple or list its positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def objective(output: Any) -> Tensor:
    """What backward starts from: the outputs' loss, or else a weighted sum of them."""
    return _loss(output, dict(_tensors("output", output)))


def _loss(output: Any, results: dict[str, Tensor]) -> Tensor:
    loss = getattr(output, "loss", None)
    return _scalar(results) if loss is None else loss


def fresh(batch: Any) -> Any:
    """A copy of the batch, since a run may change it (a cache, for example)."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return {name: fresh(value) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(fresh, batch))
    return copy.deepcopy(batch)


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in a tensor, a mapping or a sequence."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(str(key), item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)


def _shown(t: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """A result with zeros at positions that the batch's attention_mask hides.

    A query there sees no key at all, and eager code's result for it depends on how it masks.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)  # lengths
    if two or not isinstance(mask, Tensor) or mask.dim() != 2 or t.shape[:2] != mask.shape:
        return t
    return torch.where(mask.bool().view(*mask.shape, *[1] * (t.dim() - 2)), t, 0.0)


def _scalar(results: dict[str, Tensor]) -> Tensor:
    """A loss for models without one. Random weights: the mean of a norm's output is flat."""
    seed = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(t.shape, generator=seed, dtype=torch.float64, device="cpu").to(t)
        for t in results.values()
    ]
    return torch.stack(
        [(t * w).sum() for t, w in zip(results.values(), weights, strict=True)]
    ).sum()


def _double(batch: Batch) -> Batch:
    if isinstance(batch, Mapping):
        return {name: _double_if_floating(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_double_if_floating(value) for value in batch]
    return _double_if_floating(batch)


def _double_if_floating(value):
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _infinities(t: Tensor) -> Tensor:
    """1 where a result is inf, -1 where it is -inf, else 0."""
    return t.isposinf().char() - t.isneginf().char()


def _finite(t: Tensor) -> Tensor:
    return t.masked_fill(t.isinf(), 0.0)


def _error(t: Tensor, exact: Tensor) -> Tensor:
    """Each element's error, 0 where both are the same infinity."""
    return (t - exact).masked_fill(t == exact, 0.0)


def _largest(t: Tensor) -> Tensor:
    return t.abs().max() if t.numel() else t.new_zeros(())
