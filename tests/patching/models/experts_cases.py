"""Tiny mixture-of-experts models of transformers for tests of `patch` and `quantize`."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fusedops.patching.core.kinds import only
from patching.architectures import GROUPED, WIDE

ALONE = only("experts")
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
MODELS = {
    "qwen3_moe": {**WIDE, **ROUTED, "decoder_sparse_step": 1},
    "mixtral": {**GROUPED, **LOCAL},
    "gpt_oss": {**WIDE, **LOCAL},
    "olmoe": {**GROUPED, "num_experts": 6, "num_experts_per_tok": 2},
    "phimoe": {**GROUPED, **LOCAL},
    "granitemoe": {**GROUPED, **LOCAL},
}


def build(name, dtype=torch.float32, **changed):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MODELS[name] | changed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # transformers leaves some biases at zero
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.to(dtype)


def ids(length=9):
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))


def results(model):
    """Logits and the parameters' gradients."""
    model.zero_grad()
    out = model(input_ids=ids(), labels=ids(), use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **grads}
