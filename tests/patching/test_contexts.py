"""patch gives the same report within any of torch's contexts, and leaves random numbers alone."""

from contextlib import contextmanager
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, autograd, nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops import fuse_always
from fusedops.patching import patch
from fusedops.patching.lines.rotary import site as rotary
from fusedops.patching.modules import linear
from fusedops.patching.modules.norm import site as norm_site
from patching.lines.mlp_cases import Packed
from patching.lines.residual_cases import PostNorm
from patching.modules.test_linear import Following
from patching.modules.test_norm import LlamaLike
from patching.quiet import quietly

pytest.importorskip("transformers")
from patching.models.attention_models import build


class Doubling(TorchFunctionMode):
    """Changes what torch's functions give, as a mode that emulates another number format does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        changes = func in (F.silu, F.gelu, F.linear, torch.rsqrt, Tensor.matmul)
        return result * 2 if changes else result


class Tripling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return (
            result * 3
            if func in (torch.ops.aten.silu.default, torch.ops.aten.mm.default)
            else result
        )


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    """torch also fills new tensors with NaN then."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS = {
    "anomaly mode": autograd.detect_anomaly,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "torch.device": lambda: torch.device("meta"),
    "function mode": Doubling,
    "dispatch mode": Tripling,
    "hooks of saved tensors": lambda: graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
    "no hooks of saved tensors": lambda: graph.disable_saved_tensors_hooks("not here"),
    "one thread of autograd": lambda: autograd.set_multithreading_enabled(False),
}  # fmt: skip


@pytest.fixture
def nothing_known(outside, monkeypatch):
    """Forgets what running other modules and functions showed."""
    names = (norm_site, "_recipes"), (linear, "_forms"), (rotary, "_rotations"), (rotary, "_probed")
    for module, name in names:
        monkeypatch.setattr(module, name, WeakKeyDictionary())


def models():
    torch.manual_seed(0)
    kinds = nn.ModuleList([LlamaLike(), PostNorm(), Packed(), Following()])
    return [kinds, build("gemma2"), build("gpt_oss")]


@pytest.fixture(scope="module")
def outside():
    """The reports without a context."""
    with fuse_always():
        return [str(quietly(patch, model)) for model in models()]


@pytest.mark.usefixtures("any_size", "nothing_known")
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", CONTEXTS)
def test_the_report_is_the_same_in_a_context(name, outside):
    within = models()
    state = torch.random.get_rng_state()
    with CONTEXTS[name]():
        reports = [quietly(patch, model) for model in within]
        assert torch.equal(torch.random.get_rng_state(), state)
    assert list(map(str, reports)) == outside
    assert not any("not SiLU" in site.reason for report in reports for site in report.skipped)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_the_context_is_as_it_was_after_patch():
    """A mode of the caller's still sees the operations after patch, in the same order."""
    with autograd.detect_anomaly(check_nan=False), torch.device("meta"), Doubling():
        with graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            quietly(patch, LlamaLike().to_empty(device="cpu"))
            x = torch.ones(3, device="cpu", requires_grad=True)
            (gradient,) = autograd.grad((x * x).sum(), x)
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
        assert torch.empty(1).is_meta
        assert (
            F.silu(torch.ones(1, device="cpu")).item()
            == 2 * torch.sigmoid(torch.tensor(1.0, device="cpu")).item()
        )
    assert gradient.tolist() == [4.0] * 3
