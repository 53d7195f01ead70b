"""The choice between fusedops' and torch's attention on GPUs without timings; tensors are fake."""

import copy
import importlib

import pytest
import torch
from axes import grid
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers")

from fusedops import fuse_always, measured, patch
from fusedops.patching.core.calls import UNMEASURED
from fusedops.patching.core.config import view_of
from fusedops.patching.core.thresholds import attention_unmeasured
from fusedops.patching.models.attention.interface import _why
from patching.models.attention_models import build

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Attention(torch.nn.Module):
    """Asks for nothing; `config` is what a test gives it."""

    is_causal = False


def why(module, width=64, dtype=BF16, values=None, extra=None):
    """Why a call on a GPU runs torch's code; empty if it runs the kernel."""
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, 100, width, dtype=dtype, device="cuda") for heads in (4, 2))
        v = torch.empty(2, 2, 100, values or width, dtype=dtype, device="cuda")
        bias = torch.empty(1, 4, 100, 100, dtype=dtype, device="cuda")
        extras = {
            None: {},
            "softcap": {"softcap": 30.0},
            "sinks": {"s_aux": torch.empty(4, dtype=dtype, device="cuda")},
            "bias": {"position_bias": bias},
        }
        return _why(module, q, k, v, None, **extras[extra])


@grid(
    "dtype,width,values,extra,kernel",
    [
        (BF16, 64, None, None, False),  # sdpa has a kernel
        (BF16, 64, None, "softcap", True),
        (F16, 128, None, "sinks", True),
        (BF16, 128, None, "bias", True),
        (BF16, 129, None, "softcap", False),  # Gemma 2 has 256
        (BF16, 64, 256, "bias", False),
        (F32, 64, None, "softcap", False),  # no tensor cores
    ],
)
def test_what_runs_where_nobody_measured(dtype, width, values, extra, kernel):
    assert why(Attention(), width, dtype, values, extra) == ("" if kernel else UNMEASURED)
    with fuse_always():
        assert why(Attention(), width, dtype, values, extra) == ""


def test_autocast_decides_the_dtype():
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses without a GPU
    try:
        assert why(Attention(), dtype=F32, extra="softcap") == ""
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_a_patched_model_leaves_such_calls_to_torch():
    model = build("llama")
    patch(model)
    module = model.model.layers[0].self_attn
    assert why(module) == why(module, 256, extra="softcap") == UNMEASURED
    again = copy.deepcopy(model).model.layers[0].self_attn
    assert view_of(again) is not None and why(again) == UNMEASURED


def test_a_compiled_call_decides_in_its_graph():
    def left(q):
        return q + attention_unmeasured(q, q, True)

    torch._dynamo.reset()
    compiled = torch.compile(left, fullgraph=True, backend="eager", dynamic=True)
    assert compiled(torch.zeros(1, 2, 3, 64)).all()
    with fuse_always():
        assert not compiled(torch.zeros(1, 2, 3, 64)).any()


def test_the_report_says_so_until_the_gpu_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path))
    model = build("llama")
    assert "not measured" not in str(patch(model))  # on a CPU
    module = importlib.import_module(patch.__module__)
    monkeypatch.setattr(module, "_gpus", lambda model: ["NVIDIA H200"])
    assert "\nnot measured on this GPU (NVIDIA H200): `fusedops bench" in str(patch(model))
    measured.remember("NVIDIA H200", "2026-11-25")
    assert "not measured" not in str(patch(model))
