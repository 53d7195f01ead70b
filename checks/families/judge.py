"""Checks one model family: builds, runs, patches, compares and unpatches a tiny model."""

import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from checks.families.families import auto_class
from checks.families.inputs import batches
from checks.families.media import unseen
from checks.families.shrink import SHRINKINGS, Shrinking, tiny
from fusedops.patching import fuse_always, patch, unpatch
from fusedops.patching.report import PatchReport
from fusedops.patching.yardstick import Yardstick, run

__all__ = ["CRASHED", "RIGHT", "UNBUILT", "UNKNOWN", "WRONG", "first_that_runs", "judge", "said"]

RIGHT, WRONG, CRASHED, LEFT_OVER = "right", "wrong", "crash", "unpatch"
UNBUILT, UNRUN = "not built", "not run"
UNKNOWN = "unknown"  # a plan needs numbers that depend on weights, and its error says so
MOST_PARAMETERS = 30_000_000
NOISE = 0.1
NEW_TOKENS = 4
HOPELESS = "required positional argument"  # no other size of the model would help
WITH_LABELS = "causal", "masked", "seq2seq", "audio", "multimodal"

Row = dict[str, Any]


def judge(kind: str, family: str) -> Row:
    """Returns the family's row in the table. A failure becomes its verdict, not an error."""
    start, row = time.perf_counter(), {"kind": kind, "family": family, "verdict": UNRUN}
    with warnings.catch_warnings(), fuse_always():  # a tiny model then runs as a large one
        warnings.simplefilter("ignore")
        try:
            _judge(kind, family, row)
        except Exception as error:  # noqa: BLE001  a model's own code raises anything
            row |= {
                "verdict": CRASHED,
                "why": said(error),
                "trace": traceback.format_exc()[-3000:],
            }
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _judge(kind: str, family: str, row: Row) -> None:
    runnable = first_that_runs(kind, family)
    if isinstance(runnable, dict):
        row |= runnable
        return
    model, batch, shrinking = runnable
    row |= {"model": type(model).__name__, "config": shrinking.name, "inputs": sorted(batch)}
    row["text alone"] = unseen(model, batch)
    row["parameters"] = sum(p.numel() for p in model.parameters())
    before = Yardstick(model, batch)
    _own_randomness(model, batch, before, row)
    decoding = _decoding(model, batch, row)
    unpatched = _state(model)
    report = patch(model)
    row |= _sites(report)
    row["slack"] = _slack(before)
    complaints = _complaints(before, run(model, batch), model)
    for _ in range(2):  # the second run precomputes the norms that the first one linked
        results = run(model, batch, gradients=False)
        complaints += _complaints(before, results, model, gradients=False)
    if decoding:
        complaints += _complaints(decoding, decoding.results(model, batch), model)
    unpatch(model)
    left = _left_over(model, unpatched, before)
    row["verdict"] = WRONG if complaints else LEFT_OVER if left else RIGHT
    row["why"] = "; ".join(complaints or left)


# Building


def first_that_runs(kind: str, family: str) -> tuple[nn.Module, dict, Shrinking] | Row:
    """Returns the family's model and a batch that it accepts, or why there is none."""
    reasons: list[tuple[str, str]] = []
    for shrinking in SHRINKINGS:
        try:
            model = _build(kind, family, shrinking)
        except Exception as error:  # noqa: BLE001  a model's own code raises anything
            reasons.append((UNBUILT, said(error)))
            continue
        tried = []
        for batch in batches(model, labelled=kind in WITH_LABELS):
            if not (why := _runs(model, batch)):
                return model, batch, shrinking
            tried.append(why)
        reasons += [(UNRUN, why) for why in tried]
        if all(HOPELESS in why for why in tried):
            break
    verdict = UNBUILT if all(stage == UNBUILT for stage, _ in reasons) else UNRUN
    return {"verdict": verdict, "why": next(why for stage, why in reasons if stage == verdict)}


def _build(kind: str, family: str, shrinking: Shrinking) -> nn.Module:
    """Returns a model in eval mode with random weights everywhere, even in norms and biases."""
    from transformers import CONFIG_MAPPING

    extra = {"is_decoder": True} if kind == "causal" else {}
    config = tiny(CONFIG_MAPPING[family], shrinking, **extra)
    config.architectures = config.architectures or []  # None unless a family has several
    auto = auto_class(kind, family)
    # Grouped experts have no float64.
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config, **options).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters after shrinking")
    torch.manual_seed(0)
    model = auto.from_config(config, **options).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                drawn = p.isfinite() & (p.abs() < 1e3)  # else uninitialised memory
                p.copy_(torch.where(drawn, p, 0.0) + NOISE * torch.randn_like(p))
    return model


def _runs(model: nn.Module, batch: dict) -> str:
    """Returns why the model does not accept the batch; empty if it does."""
    try:
        run(model, batch)
        results = run(model, batch)  # a model may cache results of the first run
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        return said(error)
    broken = [name for name, t in results.items() if t.isnan().any()]
    return f"NaN in {broken[0]}" if broken else ""


# Checking


def _own_randomness(model: nn.Module, batch: dict, before: Yardstick, row: Row) -> None:
    """Handles models that draw random numbers in eval mode: float64 draws other numbers."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        again = run(model, batch)
    row["random"] = bool(_moved(before.eager, again))
    if row["random"]:
        before.exact = before.eager
    row["float64"] = before.exact is not before.eager


def _complaints(
    before: Yardstick, fused: dict[str, Tensor], model: nn.Module, gradients: bool = True
) -> list[str]:
    off = before.off(fused, model, gradients)
    return [_complaint(before, name, fused.get(name)) for name in off[:4]]


def _complaint(before: Yardstick, name: str, fused: Tensor | None) -> str:
    if fused is None:
        return f"{name}: missing"
    off = (fused - before.exact[name]).abs().max()
    seen = max((t[name] - before.exact[name]).abs().max() for t in before.seen)
    size = before.exact[name].abs().max()
    return f"{name}: off by {off:.1e}, rounding alone by {seen:.1e}, size {size:.1e}"


def _slack(before: Yardstick) -> float:
    """How far rounding alone moves the most affected result; above 0.01, little is proven."""
    moved = [0.0]
    for name, exact in before.exact.items():
        size = max(exact.abs().max().item(), before.typical) if exact.numel() else 0.0
        if size and exact.isfinite().all():
            moved += [(t[name] - exact).abs().max().item() / size for t in before.seen]
    return float(f"{max(moved):.1e}")


def _sites(report: PatchReport) -> Row:
    skipped = Counter((site.kind, site.reason) for site in report.skipped)
    fused = Counter((site.kind, site.now) for site in report.fused)
    return {
        "found": {kind: total for kind, (_, total) in report.coverage.items()},
        "fused": {kind: n for kind, (n, _) in report.coverage.items()},
        "now": [[kind, now, n] for (kind, now), n in sorted(fused.items())],
        "skipped": [[kind, reason, n] for (kind, reason), n in sorted(skipped.items())],
    }


# Unpatch


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "classes": [type(module) for module in model.modules()],
        "state dict keys": list(model.state_dict()),
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def _left_over(model: nn.Module, unpatched: dict[str, Any], before: Yardstick) -> list[str]:
    now, again = _state(model), run(model, before.batch)
    left = [f"{what} differ after unpatch" for what, was in unpatched.items() if was != now[what]]
    moved = _moved(before.eager, again)
    return left + [f"{name} differs bitwise after unpatch" for name in moved[:4]]


def _moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Returns the results that are not bitwise equal, NaN included."""
    both = before.keys() & after.keys()
    other = (n for n in both if not torch.equal(_bits(before[n]), _bits(after[n])))
    return sorted({*other, *(before.keys() ^ after.keys())})


def _bits(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)


# Generation


def _decoding(model: Any, batch: dict, row: Row) -> Yardstick | None:
    """Returns the logits of each generated token, if the unpatched model can decode greedily.

    All runs use the unpatched model's tokens: after one different token, all later ones would
    differ.
    """
    if not getattr(model, "can_generate", bool)():
        return None
    names = batch.keys() - {"labels", "use_cache", "decoder_input_ids", "attention_mask"}
    inputs = {name: batch[name] for name in names}
    try:
        tokens = _generate(model, inputs).sequences
        decoding = Yardstick(model, batch, _forced(inputs, tokens))
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        row["generate"] = f"not run: {said(error)}"
        return None
    row["generate"] = f"{NEW_TOKENS} tokens"
    return decoding


def _forced(inputs: dict, tokens: Tensor) -> Callable[[Any, Any], dict[str, Tensor]]:
    def the_next(row: int, ids: Tensor) -> list[int]:
        return [int(tokens[row, len(ids)])]

    def results(model: Any, batch: Any) -> dict[str, Tensor]:
        dtype = next(model.parameters()).dtype
        same = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        generated = _generate(model, same, prefix_allowed_tokens_fn=the_next)
        return {f"logits of new token {i}": t for i, t in enumerate(generated.logits)}

    return results


def _generate(model: Any, inputs: dict, **options: Any) -> Any:
    options |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 1
    options |= {"num_beams": 1, "output_logits": True, "return_dict_in_generate": True}
    with torch.random.fork_rng(devices=()), torch.no_grad():
        return model.generate(**{name: t.clone() for name, t in inputs.items()}, **options)


def said(error: BaseException) -> str:
    """Returns the error on one line, without the path of installed packages."""
    first = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {first}"[:200].rstrip()
