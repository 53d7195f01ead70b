"""Tests that test_uncompiled.py runs in a process without the compiled library."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops import extension, functional, optim
from fusedops.testing import gradients

pytestmark = pytest.mark.filterwarnings("ignore:fusedops has no compiled part")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def test_this_process_has_no_compiled_part():
    assert extension.UNCOMPILED and not extension.BUILD


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, RESIDUAL, ROW, HEAD = drawn(6, 40), drawn(40, 6).T, drawn(40), drawn(11, 40)
Q, K, V = drawn(2, 4, 6, 16), drawn(2, 2, 7, 16), drawn(2, 2, 7, 8)
TARGET = torch.tensor([1, -100, 9, 0, 10, 3])
CU = torch.tensor([0, 2, 6])
BLOCKS = {"block_table": torch.tensor([[2, 0], [1, 3]]), "seqused_k": torch.tensor([3, 7])}
CHOICES = torch.tensor([[0, 2], [1, 3], [2, 1], [0, 1], [2, 0], [1, 2]])
CODES = functional.quantize_weight(HEAD, "int4")
EXPERTS = [functional.quantize_experts(drawn(3, *shape), "int8") for shape in ((24, 40), (40, 12))]
FORMATS = ("int8", "int4", "nf4")
LOSS = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "scale": 0.5}


def gates(x):
    """The options of experts, with biases in x's dtype."""
    biases = {"gate_up_bias": drawn(3, 24).to(x), "down_bias": drawn(3, 40).to(x)}
    return biases | {"limit": 1.0, "up_offset": 1.0}


# Public function, and what tells calls apart: a function of the tensors that follow it.
CALLS = {
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, [40], w, b), X, ROW, ROW),
    "rms_norm": (lambda x, w: functional.rms_norm(x, [40], w, rounding="llama"), X, ROW),
    "add_layer_norm": (functional.add_layer_norm, X, RESIDUAL, ROW, ROW),
    "add_rms_norm": (lambda *t: functional.add_rms_norm(*t, offset=1.0), X, RESIDUAL, ROW),
    "swiglu": (lambda *t: functional.swiglu(*t, limit=1.0, alpha=1.7), X, RESIDUAL),
    "swiglu packed": (functional.swiglu, X),
    "geglu": (lambda x: functional.geglu(x, approximate="tanh"), X),
    "linear": (lambda *t: functional.linear(*t, "gelu"), X, HEAD, drawn(11)),
    "rotary_embedding": (functional.rotary_embedding, Q, Q, drawn(2, 6, 8), drawn(2, 6, 8)),
    "cross_entropy": (lambda x: functional.cross_entropy(x, TARGET, **LOSS), drawn(6, 11)),
    "linear_cross_entropy": (
        lambda x, w, b: functional.linear_cross_entropy(x, w, TARGET, linear_bias=b, **LOSS),
        X,
        HEAD,
        drawn(11),
    ),
    "linear_log_probs": (
        lambda *t: functional.linear_log_probs(*t, TARGET, return_entropy=True, temperature=0.7),
        X,
        HEAD,
    ),
    "attention": (
        lambda q, k, v, sinks, bias: functional.attention(
            q, k, v, causal=True, window=(3, -1), softcap=5.0, sinks=sinks, bias=bias
        ),
        Q,
        K,
        V,
        drawn(4),
        drawn(6, 7),
    ),
    "attention of sequences": (
        lambda *t: functional.attention(*t, cu_seqlens_q=CU, cu_seqlens_k=CU, return_lse=True),
        drawn(6, 4, 16),
        drawn(6, 2, 16),
        drawn(6, 2, 8),
    ),
    "attention with a paged cache": (
        lambda *t: functional.attention(*t, **BLOCKS),
        drawn(2, 4, 1, 16),
        drawn(4, 4, 2, 16),
        drawn(4, 4, 2, 16),
    ),
    "scaled_dot_product_attention": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        Q,
        K,
    ),
    "merge_attention": (
        lambda o, lse: functional.merge_attention(o.unbind(), lse.unbind()),
        drawn(2, 2, 4, 6, 16),
        drawn(2, 2, 4, 6),
    ),
    "experts": (
        lambda *t: functional.experts(t[0], CHOICES, *t[1:], **gates(t[0])),
        X,
        drawn(6, 2),
        drawn(3, 24, 40),
        drawn(3, 40, 12),
    ),
    "experts quantized": (
        lambda *t: functional.experts(
            t[0], CHOICES, t[1], *EXPERTS, **gates(t[0]), compute="exact"
        ),
        X,
        drawn(6, 2),
    ),
    "quantized_linear": (
        lambda x, b: functional.quantized_linear(x, CODES, b, activation="silu", compute="exact"),
        X,
        drawn(11),
    ),
}


def results():
    """Each call's results and gradients in float32."""
    return {name: gradients(run, leaves) for name, (run, *leaves) in CALLS.items()}


def without_gradients():
    """Results of functions that have no gradient."""
    outputs = {f"quantize_weight {f}": functional.quantize_weight(HEAD, f).qweight for f in FORMATS}
    outputs["dequantize_weight"] = functional.dequantize_weight(CODES)
    outputs["quantize_experts"] = EXPERTS[0].qweight
    outputs["dequantize_experts"] = functional.dequantize_experts(EXPERTS[0])
    outputs["rms_norm"] = functional.rms_norm(X, [40], ROW, output_format="int8")[0]
    (outputs["add_rms_norm"], _), _ = functional.add_rms_norm(X, RESIDUAL, output_format="int8")
    outputs["swiglu"] = functional.swiglu(X, RESIDUAL, output_format="int8")[0]
    p = torch.nn.Parameter(X.clone())
    p.grad = X.clone()
    outputs["clip_grad_norm_"] = functional.clip_grad_norm_([p], 1.0)
    return outputs | {"clip_grad_norm_ gradient": p.grad}


def test_every_public_function_is_called():
    names = {name.partition(" ")[0] for name in (*CALLS, *without_gradients())}
    assert names == {*functional.__all__} - {"QuantizedWeight"}


def test_they_are_torchs_functions():
    """Compares with functions that share no code with the references."""
    near = torch.testing.assert_close
    near(functional.layer_norm(X, [40], ROW), F.layer_norm(X, [40], ROW))
    near(functional.rms_norm(X, [40], ROW, 1e-5), F.rms_norm(X, [40], ROW, 1e-5))
    y, h = functional.add_layer_norm(X, RESIDUAL, ROW)
    near((y, h), (F.layer_norm(X + RESIDUAL, [40], ROW), X + RESIDUAL))
    near(functional.swiglu(X, RESIDUAL), F.silu(X) * RESIDUAL)
    near(functional.geglu(X), F.gelu(X[:, :20]) * X[:, 20:])
    sdpa = F.scaled_dot_product_attention(Q, K, V, enable_gqa=True)
    near(functional.attention(Q, K, V), sdpa)
    loss = F.cross_entropy(X @ HEAD.T, TARGET)
    near(functional.linear_cross_entropy(X, HEAD, TARGET), loss)
    near(functional.cross_entropy(X @ HEAD.T, TARGET), loss)


COMPILED = [name for name in CALLS if "experts" not in name and "cache" not in name]


@pytest.mark.parametrize("name", COMPILED)
def test_compile(name):
    run, *leaves = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, leaves), gradients(run, leaves))


def test_inductors_dropout_is_a_dropout():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: functional.add_rms_norm(x, x, dropout_p=0.25), fullgraph=True
    )
    _, h = compiled(torch.ones(64, 64))
    dropped = h == 1
    assert 0.2 < dropped.double().mean() < 0.3
    torch.testing.assert_close(h[~dropped], torch.full_like(h[~dropped], 1 + 1 / 0.75))


@pytest.mark.parametrize("name", CALLS)
def test_autocast(name):
    """The gradients are there, and near those of float32; of codes, which stay in it, the same."""
    run, *leaves = CALLS[name]

    def cast(*tensors):
        with torch.autocast("cpu", BF16):
            return run(*tensors)

    found, wide = gradients(cast, leaves), gradients(run, leaves)
    for key, t in wide.items():
        most = 0.0 if "quantized" in name else 0.05 * t.norm() + 1e-3
        assert (found[key].float() - t).norm() <= most, key


def test_vmap_double_backward_meta_and_nested_tensors():
    x, row = X.double(), ROW.double()

    def loss(x):
        return functional.rms_norm(x, [40], row, 1e-5).square().sum()

    each = torch.stack([torch.func.grad(loss)(sample) for sample in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), each)
    q = drawn(1, 2, 3, 4).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q: functional.attention(q, q, q, causal=True), q)
    meta = torch.empty(2, 4, 6, 16, device="meta")
    assert functional.attention(meta, meta, meta).shape == meta.shape
    jagged = torch.nested.nested_tensor([drawn(2, 8), drawn(3, 8)], layout=torch.jagged)
    values = functional.swiglu(jagged.values(), jagged.values())
    torch.testing.assert_close(functional.swiglu(jagged, jagged).values(), values)


# What a reference would compute silently, though it makes no sense.
INTEGERS, PACKED = torch.ones(3, 8).int(), [drawn(4, 2, 8)] * 3
WRONG = {
    "layer_norm: .* must end with the normalized shape": lambda: functional.layer_norm(X, [6]),
    "rms_norm: a parameter must be": lambda: functional.rms_norm(X, [40], ROW[:1]),
    "add_rms_norm: dropout_p must be": lambda: functional.add_rms_norm(X, X, dropout_p=2.0),
    "rms_norm: rounding must be": lambda: functional.rms_norm(X, [40], rounding="other"),
    "layer_norm: inputs must be floating": lambda: functional.layer_norm(INTEGERS, [8]),
    "codes have no gradient": lambda: functional.swiglu(
        X.clone().requires_grad_(), output_format="int8"
    ),
    "swiglu: gate without up must have": lambda: functional.swiglu(X[:, :3]),
    "swiglu: limit must be": lambda: functional.swiglu(X, limit=-1.0),
    "geglu: approximate must be": lambda: functional.geglu(X, approximate="other"),
    "rotary_embedding: cos must have": lambda: functional.rotary_embedding(
        Q, Q, *[drawn(2, 6, 5)] * 2
    ),
    "target does not fit": lambda: functional.linear_cross_entropy(
        X.view(2, 3, 40), HEAD, TARGET.view(3, 2)
    ),
    "temperature must be": lambda: functional.linear_log_probs(X, HEAD, TARGET, temperature=-1.0),
    "top_k_index must be from 0 to 3": lambda: functional.experts(
        X, CHOICES + 1, drawn(6, 2), drawn(3, 24, 40), drawn(3, 40, 12)
    ),
    "x must be floating-point of out_dtype": lambda: functional.quantized_linear(
        X, CODES, out_dtype=BF16
    ),
    "compute must be": lambda: functional.quantized_linear(X, CODES, compute="other"),
    "must have 4 dimensions": lambda: functional.attention(*PACKED),
    "k's heads must divide q's, 1, got 2": lambda: functional.attention(Q[:, :1], K, V),
    "bias must be bool": lambda: functional.attention(Q, K, V, bias=torch.ones(6, 7).int()),
    "window must be": lambda: functional.attention(Q, K, V, window=(-3, 0)),
    "cu_seqlens must grow from 0 to at most 4": lambda: functional.attention(
        *PACKED, cu_seqlens_q=CU, cu_seqlens_k=CU
    ),
    "seqused_k must be from 0 to 8": lambda: functional.attention(
        Q[:, :2, :1],
        *[drawn(4, 4, 2, 16)] * 2,
        **BLOCKS | {"seqused_k": torch.tensor([9, 1])},
    ),
    "block_table must be from 0 to 2": lambda: functional.attention(
        Q[:, :2, :1], *[drawn(3, 4, 2, 16)] * 2, **BLOCKS
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_would_be_wrong_raises(message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        WRONG[message]()


def test_patched_llama_trains():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    model = copy.deepcopy(plain)
    assert "norm" in str(fusedops.patch(model))
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    for m in (plain, model):
        m(input_ids=ids, labels=ids).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
        b.grad = a.grad.clone()  # a first step divides by |gradient|: rounding would be all of it
    torch.optim.AdamW(plain.parameters(), 1e-2).step()
    optim.AdamW(model.parameters(), 1e-2).step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    fusedops.verify(model, {"input_ids": ids, "labels": ids})
    fusedops.unpatch(model)
    assert type(model) is type(plain)


def test_a_quantized_model_is_near():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    x = drawn(3, 64)
    before = model(x)
    fusedops.quantize(model, "int8")
    assert (model(x) - before).norm() < 0.05 * before.norm()


def test_backend_cpu_says_why():
    with pytest.raises(RuntimeError, match="cannot run: no compiled part: FUSEDOPS_COMPILED=0"):
        fusedops.backend("cpu").__enter__()
    with fusedops.backend("reference"):
        functional.layer_norm(drawn(3, 8), [8])


def test_the_report_says_why():
    first = fusedops.env_report().splitlines()[0]
    assert "not compiled: FUSEDOPS_COMPILED=0" in first
    assert first.endswith(". Load it: unset FUSEDOPS_COMPILED")


def stepped(optimizer, params):
    """The parameters after three steps."""
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = (drawn(*p.shape) * (step + 1 + i)).to(p.dtype)
        optimizer.step()
    return params


def parameters(dtype):
    return [torch.nn.Parameter(drawn(*shape).to(dtype)) for shape in ((40, 33), (300,))]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=str)
def test_adamw_is_torchs(dtype, options):
    ours, torchs = parameters(dtype), parameters(dtype)
    optimizer = optim.AdamW(ours, 1e-2, weight_decay=0.1, **options)
    stepped(optimizer, ours)
    stepped(torch.optim.AdamW(torchs, 1e-2, weight_decay=0.1, **options), torchs)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    again = torch.optim.AdamW(parameters(dtype))
    again.load_state_dict(optimizer.torch_state_dict())


def test_adamw_clips():
    ours, torchs = parameters(F32), parameters(F32)
    optimizer = torch.optim.AdamW(torchs, 1e-2)
    clip = torch.nn.utils.clip_grad_norm_
    optimizer.register_step_pre_hook(lambda *_: clip(torchs, 0.5) and None)
    stepped(optim.AdamW(ours, 1e-2, max_grad_norm=0.5), ours)
    torch.testing.assert_close(ours, stepped(optimizer, torchs))


NEEDS_KERNELS = [{"state_dtype": "int8"}, {"state_dtype": "bfloat16"}, {"offload": "cpu"}]
NEEDS_KERNELS += [{"master_weights": "remainder"}, {"stochastic_rounding": True}]


@pytest.mark.parametrize("options", NEEDS_KERNELS, ids=str)
def test_state_that_needs_kernels_raises(options):
    ((name, value),) = options.items()
    params = parameters(BF16)
    optimizer = optim.AdamW(params, **options)
    message = f"AdamW: {name}={value!r} cannot run: no compiled part: .*FUSEDOPS_COMPILED"
    with pytest.raises(RuntimeError, match=message):
        stepped(optimizer, params)
    assert not optimizer.state


def test_an_8_bit_checkpoint_becomes_float32():
    """Its conversion needs no kernel."""
    params = parameters(F32)
    state = {
        i: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones_like(p, dtype=torch.int8),
            "exp_avg_sq": torch.ones_like(p, dtype=torch.uint8),
            "exp_avg_scale": torch.ones(-(-p.numel() // 256)),
            "exp_avg_sq_scale": torch.ones(-(-p.numel() // 256)),
        }
        for i, p in enumerate(params)
    }
    optimizer = optim.AdamW(params)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    stepped(optimizer, params)
    assert optimizer.state[params[0]]["exp_avg"].dtype == F32


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save((results(), without_gradients()), Path(sys.argv[1]))
