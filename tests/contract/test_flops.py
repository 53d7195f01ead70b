"""torch's flop counter counts our operators and patched models correctly."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from axes import grid
from children import forked
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fusedops
from fusedops.backends import FAMILIES, kernels
from fusedops.functional import (
    attention,
    experts,
    linear,
    linear_cross_entropy,
    linear_log_probs,
    quantize_experts,
    quantize_weight,
)
from fusedops.functional import quantized_linear as by_codes

transformers.logging.set_verbosity_error()
ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(3, 512, (2, 256), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS}


def llama(**more):
    sizes = SIZES | {"num_key_value_heads": 2, "vocab_size": 512}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | more)), TEXT, IDS


def bert():
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=512))
    return model, TEXT, IDS


def t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=512, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), TEXT | {"decoder_input_ids": IDS}, IDS


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)), TEXT, IDS


def counted(run):
    """(operators by module, what run returned)"""
    with FlopCounterMode(display=False) as counter:
        returned = run()
    return counter.get_flop_counts(), returned


def total(run):
    return sum(counted(run)[0].get("Global", {}).values())


def step(model, inputs, labels):
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    outputs = model(**inputs, **({} if labels is None else {"labels": labels}))
    loss = outputs.logits.float().square().mean() if labels is None else outputs.loss
    loss.backward()


def by_module(model, counts):
    """The FLOP counts of modules with weights; only these have matmuls.

    torch credits an activation between two linears with whatever runs in the backward from its
    gradient to that of its input, which depends on the order of the lines around it.
    """
    root = type(model).__name__
    names = {root, *(f"{root}.{n}" for n, m in model.named_modules() if [*m.parameters()])}
    return {name: sum(ops.values()) for name, ops in counts.items() if name in {"Global", *names}}


def agree(ours, theirs):
    assert theirs["Global"] and ours.keys() == theirs.keys()
    for name, count in theirs.items():
        assert ours[name] == pytest.approx(count, rel=0.01), name


@grid(
    dtype=[torch.float32, torch.bfloat16],
    build=[llama, bert, t5, gpt2],
    train=[True, False],
    labels=[True, False],
)
def test_a_patched_model_counts_what_it_counted(build, dtype, train, labels):
    """Dropout (train) sends torch's attention on CPUs to separate products."""
    model, inputs, targets = build()
    model.to(dtype).train(train)
    run = model, inputs, targets if labels else None
    flops, _ = counted(lambda: step(*run))
    with fusedops.fuse_always():
        report = fusedops.patch(model)
        actual, _ = counted(lambda: step(*run))
    agree(by_module(model, actual), by_module(model, flops))
    ran = {str(operator) for operator in actual["Global"]}
    assert {"fusedops.attention_forward", "fusedops.attention_backward"} <= ran
    activated = any(site.kind == "linear" and site.now != "linear" for site in report.fused)
    assert not activated or {"fusedops.linear_forward", "fusedops.linear_backward"} <= ran


# The products of a layer of llama(): queries with keys, and the last linear.
SCORES = 2 * prod((2, 4, 256, 256, 16))
DOWN_PROJ = 2 * prod((2, 256, 128, 64))


def test_fused_attention_counts_one_product_more_than_eager_attention():
    """Its backward computes the scores a second time."""
    model, inputs, labels = llama(attn_implementation="eager")
    flops = total(lambda: step(model, inputs, labels))
    fusedops.patch(model)
    with fusedops.fuse_always():
        assert total(lambda: step(model, inputs, labels)) == flops + 2 * SCORES


def test_float64_counts_one_product_less_of_attention():
    """The composite keeps the scores; torch's fused kernel computes them a second time."""
    model, inputs, labels = llama()
    model.double()
    flops = total(lambda: step(model, inputs, labels))
    fusedops.patch(model)
    with fusedops.fuse_always():
        assert total(lambda: step(model, inputs, labels)) == flops - 2 * SCORES


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointing_recomputes_the_last_linear_of_a_layer(early_stop):
    """torch stops recomputing at the last saved tensor. Its linear saves its input before the
    product, ours after it.
    """
    model, inputs, labels = llama()
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with fusedops.fuse_always(), set_checkpoint_early_stop(early_stop):
        flops = total(lambda: step(model, inputs, labels))
        fusedops.patch(model)
        assert total(lambda: step(model, inputs, labels)) == flops + 2 * DOWN_PROJ * early_stop


@grid(dtype=[torch.float32, torch.bfloat16], format=["int8", "nf4"], fused=[True, False])
def test_a_quantized_model_counts_what_frozen_weights_do(fused, format, dtype):
    model, inputs, labels = llama()
    model.to(dtype)
    places = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in set(places) - {"lm_head"}:
        model.get_submodule(name).requires_grad_(False)
    flops, _ = counted(lambda: step(model, inputs, labels))
    fusedops.quantize(model, format)
    if fused:
        fusedops.patch(model)
    actual, _ = counted(lambda: step(model, inputs, labels))
    names = by_module(model, actual).keys() | {f"LlamaForCausalLM.{name}" for name in places}
    sums = [{n: sum(c[n].values()) for n in names if n in c} for c in (actual, flops)]
    agree(*sums)
    ran = {str(operator) for operator in actual["Global"]}
    assert {"fusedops.quantized_linear_forward", "fusedops.quantized_linear_backward"} <= ran


@grid(run=[linear_cross_entropy, linear_log_probs], dtype=[torch.float32, torch.bfloat16])
def test_a_loss_without_logits_counts_the_head_once(run, dtype):
    """The mode has patched heads make logits, so the operator is called by itself."""
    flops = 3 * 2 * 12 * 8 * 33  # forward, and the gradients of the input and of the weight
    targets = torch.arange(12).view(3, 4)
    x = torch.randn(3, 4, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(33, 8, dtype=dtype, requires_grad=True)
    actual, _ = counted(lambda: run(x, weight, targets).sum().backward())
    assert sum(actual["Global"].values()) == flops
    assert any(f"{run.__name__}_forward" in str(op) for op in actual["Global"])
    assert total(lambda: run(x, weight.detach(), targets).sum().backward()) == flops * 2 / 3
    bias = torch.randn(33, dtype=dtype, requires_grad=True)
    assert total(lambda: run(x, weight, targets, linear_bias=bias).sum().backward()) == flops
    with torch.inference_mode():
        assert total(lambda: run(x, weight, targets)) == flops / 3


@grid(activation=[None, "gelu"], trained=["all", "input", "weight", "bias"])
def test_linear_counts_the_products_that_run(trained, activation):
    held = {"input": torch.randn(2, 3, 5), "weight": torch.randn(7, 5), "bias": torch.randn(7)}
    for name, tensor in held.items():
        tensor.requires_grad_(trained in (name, "all"))
    product = 2 * 2 * 3 * 5 * 7
    flops = {"all": 3, "input": 2, "weight": 2, "bias": 1}[trained] * product
    assert total(lambda: linear(*held.values(), activation).sum().backward()) == flops


@grid(rows=[1, 40], format=["int8", "fp8", "int4", "nf4"])
def test_quantized_linear_counts_its_product_and_that_of_its_input(format, rows):
    x, q = torch.randn(rows, 64, requires_grad=True), quantize_weight(torch.randn(48, 64), format)
    product = 2 * rows * 48 * 64
    assert total(lambda: by_codes(x, q).sum().backward()) == 2 * product
    bias = torch.randn(48, requires_grad=True)
    assert total(lambda: by_codes(x.detach(), q, bias).sum().backward()) == product
    args = q.qweight, q.scales, q.zeros, None, format, 48, 64, q.group_size
    with torch.no_grad():
        tiles = torch.ops.fusedops.quantized_linear_tiles
        assert total(lambda: tiles(x, *args, "none", "none", "any", False)) == product


@grid(gated=[True, False], trained=["all", "hidden", "weights", "gate_up", "down"])
def test_experts_count_the_products_of_each_choice(trained, gated):
    """The product of dy and down runs in every backward."""
    wide = 12 if gated else 6
    held = {"hidden": torch.randn(5, 8), "weights": torch.rand(5, 2)}
    held |= {"gate_up": torch.randn(3, wide, 8), "down": torch.randn(3, 8, 6)}
    for name, tensor in held.items():
        tensor.requires_grad_(trained in (name, "all"))
    index = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [0, 1]])
    hidden, weights, *both = held.values()
    down, gate_up = 2 * index.numel() * 8 * 6, 2 * index.numel() * 8 * wide
    more = {"all": 2 * gate_up + down, "hidden": gate_up, "gate_up": gate_up, "down": down}
    flops = gate_up + down + down + more.get(trained, 0)
    run = lambda *w: experts(hidden, index, weights, *w, gated=gated).sum().backward()  # noqa: E731
    assert total(lambda: run(*both)) == flops
    if trained in ("hidden", "weights"):
        codes = [quantize_experts(weight, "int8") for weight in both]
        assert total(lambda: run(*codes)) == flops


def test_attention_counts_grouped_heads_and_widths_of_values():
    q, k, v = (torch.randn(shape) for shape in ((2, 6, 9, 8), (2, 3, 11, 8), (2, 3, 11, 5)))
    heads = 2 * 2 * 6 * 9 * 11  # multiply-adds of a column of all heads
    for options in ({}, {"causal": True}, {"window": (2, 2)}, {"softcap": 4.0}):
        assert total(lambda: attention(q, k, v, **options)) == heads * (8 + 5)  # noqa: B023
    for leaf, columns in {"q": 5 + 8, "k": 5 + 8, "v": 5}.items():
        held = {"q": q, "k": k, "v": v}
        held[leaf] = held[leaf].clone().requires_grad_()
        flops = total(lambda: attention(*held.values()).sum().backward())  # noqa: B023
        assert flops == heads * (8 + 5 + columns)


@grid(device=["cpu", "meta"], options=[{}, {"dropout_p": 0.1}, {"bias": True}])
def test_attention_counts_what_torchs_counts(options, device):
    """torch has a fused kernel for one of these calls: on CPUs, without options."""
    shapes = (2, 4, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    mask = torch.randn(1, 4, 40, 40, device=device, requires_grad=True)
    bias = mask if options.get("bias") else None
    p = options.get("dropout_p", 0.0)
    theirs = total(
        lambda: F.scaled_dot_product_attention(q, k, v, bias, p, enable_gqa=True).sum().backward()
    )
    ours = total(lambda: attention(q, k, v, bias=bias, dropout_p=p).sum().backward())
    separate = options or device == "meta"
    assert ours == theirs == 2 * prod((2, 4, 40, 40, 16)) * (6 if separate else 7)


def packed(lengths, fake=False, **longest):
    """The FLOP count of a forward and backward over sequences of these lengths."""
    tokens = sum(lengths) + 2  # some are padding
    q = torch.randn(tokens, 4, 8, requires_grad=True)
    k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(2))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    call = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **longest}
    if not fake:
        return total(lambda: attention(q, k, v, **call).sum().backward())
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in (q, k, v))
        call = {n: mode.from_tensor(t) if n.startswith("cu") else t for n, t in call.items()}
        return total(lambda: attention(q, k, v, **call).sum().backward())


def test_sequences_count_by_their_lengths():
    assert packed([3, 5, 1]) == 7 * 2 * 4 * 8 * (9 + 25 + 1)


def test_sequences_without_values_count_as_the_longest():
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    assert packed([3, 5, 1], fake=True, **longest) == 7 * 2 * 4 * 8 * 3 * 25


def multiplies(family):
    """Whether the family's definition has products of matrices."""
    definition = (ROOT / "fusedops" / "references" / f"{family}.py").read_text()
    return bool(re.search(r" @ |\bF\.linear\(", definition))


def test_every_kernel_with_a_product_has_a_formula():
    """The others are elementwise or row by row, and torch's counter has none for such."""
    without = {"cross_entropy_forward", "cross_entropy_backward", "dequantize_weight"}
    for family in FAMILIES:
        for name in kernels(family):
            has_formula = getattr(torch.ops.fusedops, name) in flop_registry
            assert has_formula == (multiplies(family) and name not in without), name


@pytest.mark.parametrize("first", ["fusedops", "torch.utils.flop_counter"])
def test_the_import_is_enough_and_imports_no_flop_counter(first):
    """torch's imports triton and takes longer than all of ours."""
    lines = f"""
import importlib, sys
importlib.import_module({first!r})
assert {first != "fusedops"} or not {{"torch.utils.flop_counter", "triton"}} & sys.modules.keys()
import fusedops, torch
from torch.utils import flop_counter
assert torch.ops.fusedops.linear_forward in flop_counter.flop_registry
assert flop_counter.__spec__.loader is flop_counter.__loader__
"""
    forked("-c", lines, bare=True).printed()


def test_formulas_of_others_stay():
    """Of a torch that counts its attention on CPUs, or of a program that taught it to."""
    lines = """
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula
register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)(
    lambda *args, **kwargs: 7)
import fusedops
q = torch.randn(1, 1, 4, 8)
with FlopCounterMode(display=False) as counter:
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert counter.get_total_flops() == 7
"""
    forked("-c", lines).printed()
