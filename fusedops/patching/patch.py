"""patch, unpatch and patched: put fused kernels into a model, or remove them.

Also look_again, which updates patch's report after later changes to the model, and fused_kinds,
which says what is fused in one module.
"""

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fusedops import notice
from fusedops.measured import reminder
from fusedops.measuring.faults import PageFaults, faults_matter, unmeasured
from fusedops.measuring.undo import afterwards, put_back
from fusedops.patching.core.instance import instead
from fusedops.patching.core.swap import (
    active_state,
    fused_modules,
    restore_states,
    states,
    unfuse_all,
)
from fusedops.patching.counts import count_calls
from fusedops.patching.lines.activated_linear import EPILOGUE
from fusedops.patching.lines.attention.site import ATTENTION, IN_LINES
from fusedops.patching.lines.layer import kinds_in, patch_layers
from fusedops.patching.lines.mlp import MLP
from fusedops.patching.lines.plain_calls import Reached, find_plain_calls
from fusedops.patching.lines.residual.site import RESIDUAL
from fusedops.patching.lines.rotary.site import ROTARY
from fusedops.patching.lines.written_loss import written_loss
from fusedops.patching.models.attention.site import attends, patch_attention, why_off
from fusedops.patching.models.experts.site import chooses, patch_experts, why_experts_off
from fusedops.patching.models.loss.site import KEEP, LATE, LINEAR, OFF, loss_now, patch_losses
from fusedops.patching.modules.linear import patch_linears
from fusedops.patching.modules.norm.site import patch_norms
from fusedops.patching.quantize import quantize as quantize_linears
from fusedops.patching.report import PatchReport, Site
from fusedops.patching.yardstick import Batch, Yardstick, run

__all__ = ["fused_kinds", "look_again", "patch", "patched", "unpatch"]


def patch(
    model: nn.Module,
    *,
    norm: bool = True,
    residual: bool = True,
    attention: bool = True,
    mlp: bool = True,
    rotary: bool = True,
    linear: bool = True,
    experts: bool = True,
    loss: bool | Literal["keep_logits"] = True,
    quantize: str | None = None,
    strict: bool = False,
    verify: Mapping[str, object] | Tensor | None = None,
) -> PatchReport:
    """Puts fused kernels into `model`, in place, and reports what was fused and what was skipped.

    Sites are found by structure. A site is swapped only if its fused function gave the module's
    results when both were run; this covers norms, activations, and linears with their own forward.
    Parameters stay the same objects under the same names, and other instances of the same classes
    are untouched. `unpatch(model)` undoes everything. Patching twice has the effect of patching
    once.

    - norm: modules that compute layer_norm or rms_norm.
    - residual: a sum and the norm of it, in one forward, if norm has fused the norm.
    - mlp: an activation of one tensor times another, in one pass. The linears around it are still
      called as modules.
    - rotary: calls to a function of q and k, or of one of them, and of a table of angles, if its
      name contains "rotary" or "rope" and it was seen to rotate.
    - linear: linears, where that is faster on this machine, together with the activation that
      follows in the same forward, method or nn.Sequential. An activation may be a module, a
      function of torch, or one of the user's own that was seen to compute the same.
    - loss: the loss function of a model with a head, if it is one of transformers' own and was seen
      to compute the cross entropy of labels; or a cross entropy of the head's output that a forward
      computes. For a plain head, the loss is computed without the logits, unless there are few, in
      16 bits on a CPU. loss="keep_logits": the forward also computes the logits' values, for code
      that reads `outputs.logits` after the optimizer's step.
    - attention: modules of transformers models that look up their attention function in the config.
      Each gets a view of the config. In other modules, calls of torch's function
      scaled_dot_product_attention and softmax attention that is written out, in the forward, in
      methods that it uses and in functions that it calls, if no other code sees the scores. On
      GPUs, where nobody has timed the kernel, only calls with a softcap, sinks or a position bias
      run it, in 16 bits with at most 128 numbers a head.
    - experts: the experts of a mixture, in models of transformers that look up their experts
      function in the config, if the gate is recognised. Each gets a view of the config. On GPUs
      they run transformers' functions, because nobody has timed the kernels there.
    - quantize: a format of `fusedops.quantize`, which runs first, with its defaults. Neither
      unpatch nor errors undo it.
    - strict: raise RuntimeError with the reasons if a site cannot be fused. What patch keeps as it
      is, such as calls of torch's functions in the model's own code, is no such site.
    - verify: a batch (the model's keyword arguments in a dict, its positional ones in a tuple or
      list, or one tensor). It is run before and after; if outputs, loss or gradients differ by more
      than rounding, RuntimeError is raised. This takes memory for a float64 copy of the model.

    If an error or interrupt ends the call, the model is restored. A second interrupt during that
    may leave it patched in part; `unpatch` then restores it.

    Each attention call on a CPU runs torch's code where that was measured to be faster, unless
    `fuse_always` is active. `fusedops calibrate` measures this machine; until then a shipped table
    of a similar CPU decides.

    What changes for the model's code:

    - A fused module's class is a subclass with the same name. `type(m) is nn.Linear` is False, so
      tools that check this (quantize_dynamic, torch.jit.script) must run before patch or after
      unpatch. `type(m)(...)` creates an unfused module of the original class.
    - An activation that appends to a global list when called is not detected.
    - A fused dropout draws another random mask than torch's, from the same distribution.
    - In 16 bits, a gated product and an activated linear are rounded once, where the model's code
      rounds twice. Rotary embeddings are rounded once, where most code rounds three times.
    - In bfloat16, changing a norm's input in place after the call makes backward raise, where code
      that casts to float32 (Llama's) had kept a copy.
    - Under autocast, a sum of bfloat16 and float32 is fused only if the result was shown to be the
      same. Autocast is checked on the model's device at the time of the call: after a move to
      another device, norms run unfused under autocast.
    - A sum and the norm fused with it are one autograd node. Where a layer returns both, a hook on
      the sum (`retain_grad`) sees its gradient without the norm's part.

    Attention is replaced if the config says sdpa, or if it says eager and the model's eager
    function was seen to give the same results. The model's config is not changed, so later calls to
    `set_attn_implementation` or `output_attentions` work as without patch. With eager, a call that
    asks for attention weights runs the eager function. A query that sees no key gives what torch's
    sdpa gives for the same mask: the mean of all values if the mask hides keys by the dtype's
    smallest number, as eager code does, and zeros for bools and -inf.

    In a forward with labels, `outputs.logits` computes its values when they are first read, which
    costs one matmul with the head's weight. Read them before that weight is stepped; afterwards,
    reading raises RuntimeError. If the weight is sharded, every rank must read them. The loss gets
    no gradient through them; results computed from them have all gradients. With LoRA or hooks on
    the head, or under torch.compile, the forward computes the logits as usual. With
    loss="keep_logits", each forward with labels computes the values and keeps them in its outputs,
    at the cost of that matmul and the logits' memory; all gradients are as with loss=True.

    Raises TypeError if model is not a module, and ValueError for an unknown `loss` or `quantize`
    format. Warns if no site was fused.
    """
    _check(model, loss)
    notice.give()
    report = PatchReport() if quantize is None else quantize_linears(model, quantize)
    before = None if verify is None else Yardstick(model, verify)
    line_kinds = (
        (RESIDUAL, residual),
        (MLP, mlp),
        (EPILOGUE, linear),
        (ROTARY, rotary),
        (ATTENTION, attention),
    )
    kinds = [kind for kind, on in line_kinds if on]
    earlier = states(model)
    try:
        if norm:
            patch_norms(model, report)
        patch_layers(model, kinds, report)
        if linear:
            patch_linears(model, report)
        losses = patch_losses(model, report, written_loss, keeps=loss == KEEP) if loss else {}
        if attention:
            patch_attention(model, report)
        if experts:
            patch_experts(model, report)
        switches = {"attention": attention, "mlp": mlp, "linear": linear, "loss": loss}
        asked = {name for name, on in switches.items() if on}
        plain_calls = find_plain_calls(model, kinds, asked, report, losses)
        report.notes += reminder(_gpus(model))
        _judge(report, strict)
        if before is not None:
            before.compare(model)
        report.notes += _on_freed_memory(model, verify)
    except BaseException:
        restore_states(model, earlier)
        raise
    report._counter = partial(  # type: ignore[misc]
        count_calls, weakref.ref(model), partial(Reached, plain_calls)
    )
    return report


def _gpus(model: nn.Module) -> list[str]:
    """The names of the GPUs that hold the model's parameters; none for fake tensors."""
    if not torch.cuda.is_initialized():
        return []
    devices = {p.device for p in model.parameters() if p.is_cuda}
    return [torch.cuda.get_device_name(device) for device in sorted(devices, key=str)]


def _on_freed_memory(model: nn.Module, batch: Batch | None) -> list[str]:
    """One line on `keep_freed_memory`, with its gain in a run of the batch if there is one."""
    if not faults_matter(model):
        return []
    if batch is None:
        return unmeasured(model)
    faults = PageFaults()
    run(model, batch)
    faults.stop()
    return faults.advice("this batch's forward and backward")


def _judge(report: PatchReport, strict: bool) -> None:
    left = [site for site in report.skipped if site.kind != "quantize"]
    if strict and (left or not report.fused):
        raise RuntimeError(f"patch: strict=True and not every site was fused\n{report}")
    if not report.fused:
        warnings.warn(f"patch: nothing was fused\n{report}", stacklevel=3)


def _check(model: nn.Module, loss: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(loss, bool) and not (isinstance(loss, str) and loss == KEEP):
        raise ValueError(f"patch: loss must be True, False or {KEEP!r}, got {loss!r}")


def unpatch(model: nn.Module) -> None:
    """Restores the original class of every module of `model`, bit for bit as before patch."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model must be a torch.nn.Module, got {type(model).__name__}")

    try:
        _restore(model)
    except BaseException:  # of a module's own code, or an interrupt
        _restore(model)
        raise


def _restore(model: nn.Module) -> None:
    put_back(model)
    unfuse_all(model)


@contextmanager
def patched(model: nn.Module, **kwargs) -> Iterator[PatchReport]:
    """Patches on entry; on exit, restores each module's state from before.

    Takes patch's arguments and yields its report.
    """
    _check(model, kwargs.get("loss", True))
    with afterwards(partial(restore_states, model, states(model))):
        yield patch(model, **kwargs)


def look_again(model: nn.Module, report: PatchReport) -> bool:
    """Updates patch's report where a fused function no longer runs.

    After patch, trainers may replace the forward of the model or its modules; users may set another
    attention, replace modules, or unpatch. Such a site moves from `fused` to `skipped`, with that
    reason. Returns whether anything changed.
    """
    now = [_now(model, site) for site in report.fused]
    changed = now != report.fused
    report.fused[:] = [site for site in now if site.now]
    report.skipped += [site for site in now if not site.now]
    if not any(site.now == LINEAR for site in report.fused):
        report.notes[:] = [note for note in report.notes if note != LATE]
    return changed


def _now(model: nn.Module, site: Site) -> Site:
    if site.kind == "loss":
        return loss_now(model, site, written_loss)
    try:
        module = model.get_submodule(site.path)
    except AttributeError:  # another library has moved the module
        return site
    if site.kind == "quantize":  # unpatch does not undo it
        return site
    why = {"attention": why_off, "experts": why_experts_off}.get(site.kind, _why_unfused)
    why = _why_unfused if site.now == IN_LINES else why
    reason = why(module)
    reason = reason or str(instead(module) or "")
    return replace(site, now="", reason=reason) if reason else site


def _why_unfused(module: nn.Module) -> str:
    """Why neither the module nor any module inside it is fused now; empty if one is."""
    return "" if fused_modules(module) else OFF


def fused_kinds(module: nn.Module) -> list[str]:
    """The kinds of sites that are fused in the module's own forward."""
    kinds = ["attention"] if attends(module) else []
    kinds += ["experts"] if chooses(module) else []
    if module in fused_modules(module):
        line_kinds, state = kinds_in(module), active_state(module)
        kinds += ["linear" if kind == EPILOGUE.name else kind for kind in line_kinds]
        if state.recipe:
            kinds.append("norm")
        elif state.form or state.head:
            kinds.append("linear")
        elif not line_kinds:
            kinds.append("module")
    return list(dict.fromkeys(kinds))
