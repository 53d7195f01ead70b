"""patch, unpatch, patched: fused kernels into a model in place, and out again."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal

from torch import Tensor, nn

from fusedops import notice
from fusedops.patching.core.swap import put_back, restore_all, states
from fusedops.patching.core.undo import afterwards, on_failure, settings
from fusedops.patching.lines.activated_linear import EPILOGUE
from fusedops.patching.lines.layer import patch_layers
from fusedops.patching.lines.mlp import MLP
from fusedops.patching.lines.residual.site import RESIDUAL
from fusedops.patching.lines.rotary import ROTARY
from fusedops.patching.models.attention.site import patch_attention
from fusedops.patching.models.loss import KEEP, patch_losses
from fusedops.patching.modules.linear import patch_linears
from fusedops.patching.modules.norm.site import patch_norms
from fusedops.patching.quantize import quantize as quantize_linears
from fusedops.patching.report import PatchReport
from fusedops.patching.yardstick import Yardstick

__all__ = ["patch", "patched", "unpatch"]


def patch(
    model: nn.Module,
    *,
    norm: bool = True,
    residual: bool = True,
    attention: bool = True,
    mlp: bool = True,
    rotary: bool = True,
    linear: bool = True,
    loss: bool | Literal["keep_logits"] = True,
    quantize: str | None = None,
    strict: bool = False,
    verify: Mapping[str, object] | Tensor | None = None,
) -> PatchReport:
    """Puts fused kernels into `model`, in place, and says what was fused and what was left.

    Sites are found by structure and swapped only when the fused function was seen to give what the
    module gives: norms, activations, and linears whose forward is not nn.Linear's are run.
    Parameters stay the same objects under the same names; other instances of the same classes are
    untouched. `unpatch(model)` takes everything back. Patching twice is patching once.

    norm: modules that compute layer_norm or rms_norm. residual: a sum and the norm of it, where
    norm has fused the norm: in one forward, or, without gradients and where it is large, the sum
    that a layer returns and the norm of it in another module, which the first forward shows. mlp:
    an activation of one tensor times another, in one pass; the linears around it are called as the
    modules that they are. linear: linears, with the activation that follows in the same forward,
    where that is faster on this machine. rotary: calls of a function of q, k, cos and sin, whose
    name has "rotary" in it, which has no branches and was seen to rotate. loss: the loss function
    of a model with a head, where it is one of transformers' own and was seen to be the cross
    entropy of labels; of a plain head the loss is computed without the logits, unless they are few,
    in bfloat16 and on a CPU. loss="keep_logits": the forward computes the logits' values as well,
    for those who read `outputs.logits` after the optimizer's step. attention: modules of
    transformers models that look up their attention function in the config; each gets a view of the
    config. quantize: a format of `fusedops.quantize`, which comes first, with its defaults; unpatch
    and errors do not undo it. strict: raise RuntimeError with the reasons when a site cannot be
    fused. verify: a batch (the model's keyword arguments in a dict, or one tensor); runs it before
    and after, and raises RuntimeError when outputs, loss or gradients differ by more than rounding.
    That takes memory for a float64 copy of the model. Whatever error or interrupt ends the call,
    the model is as it was; an interrupt in the call's last few instructions may leave it fully
    patched, never partly.

    Calls on few tokens, where torch's own lines were measured to be as fast, run those, unless
    `fuse_always` says otherwise.

    The class of a fused module is a subclass of its own with the same name: `type(m) is nn.Linear`
    is False, and tools that ask so (quantize_dynamic, torch.jit.script) come before patch or after
    unpatch. `type(m)(...)` makes an unfused module of the original class. An activation that
    appends to a global list when it is called is not seen to do so. A fused dropout draws another
    random mask than torch's, with the same distribution. In 16 bits a gated product and an
    activated linear are rounded once, where the lines round twice; so are rotary embeddings, where
    most lines round three times. In bfloat16 an in-place change of a norm's input after the call
    raises in backward, where lines that cast to float32 (Llama's) had kept a copy. Under autocast a
    sum of bfloat16 and float32 is fused where the result was proven to be the same, else it runs as
    written. What autocast changes is proven on the device that the model is on at the call: after a
    move to another one, norms run as written under autocast. A sum that is fused with a norm is one
    node with it: what a hook sees of the sum's gradient (`retain_grad`), where a layer returns
    both, is without the norm's part.

    Attention is replaced where the config says sdpa, or eager and the model's eager function was
    seen to give the same. The model's config stays as it is, so that what is set in it later, by
    `set_attn_implementation` or `output_attentions`, does what it does without patch. Where eager
    is set, a call that asks for attention weights runs eager's function. A query that sees no key
    gives zeros, as in sdpa; eager code gives the mean of the values.

    In a forward with labels `outputs.logits` then computes its values when someone reads them,
    which costs a product with the head's weight. Read them before that weight is stepped:
    afterwards a RuntimeError says so. Where the weight is sharded, every rank has to read. The loss
    has no gradient by them; what is computed from them has all gradients. With
    LoRA or hooks on the head, or under torch.compile, the forward computes logits normally. With
    loss="keep_logits" the values are computed in each forward with labels and stay in its outputs,
    at the cost of that product and of the logits' memory; all gradients are as with loss=True.
    Raises TypeError when model is not a module, ValueError for an unknown `loss` or `quantize`
    format. Warns when no site was fused.
    """
    _check(model, loss)
    notice.give()
    restores: list[Callable[[], object]] = [settings()]

    def undo() -> None:
        for restore in reversed(restores):
            restore()

    with on_failure(undo), on_failure(undo):
        report = PatchReport() if quantize is None else quantize_linears(model, quantize)
        before = None if verify is None else Yardstick(model, verify)
        wanted = (RESIDUAL, residual), (MLP, mlp), (EPILOGUE, linear), (ROTARY, rotary)
        kinds = [kind for kind, on in wanted if on]
        restores.append(partial(put_back, model, states(model)))
        if norm:
            patch_norms(model, report)
        patch_layers(model, kinds, report)
        if linear:
            patch_linears(model, report)
        if loss:
            patch_losses(model, report, keeps=loss == KEEP)
        if attention:
            patch_attention(model, report)
        _judge(report, strict)
        if before is not None:
            before.compare(model)
        return report


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
    """Gives every module of `model` its own class back: bit for bit what it was before patch."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model must be a torch.nn.Module, got {type(model).__name__}")
    undo = partial(restore_all, model)
    with on_failure(undo), on_failure(undo):
        undo()


@contextmanager
def patched(model: nn.Module, **kwargs) -> Iterator[PatchReport]:
    """Patches on entry; on exit every module is fused, or not, as it was before.

    Takes patch's arguments and gives its report.
    """
    _check(model, kwargs.get("loss", True))
    undo = partial(put_back, model, states(model))
    with afterwards(undo), afterwards(undo):
        yield patch(model, **kwargs)
