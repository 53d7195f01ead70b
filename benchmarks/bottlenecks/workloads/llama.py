"""Two Llamas: the demo's, and one with nf4 weights that learns through peft's LoRA adapters."""

import torch
from torch.utils.data import DataLoader

import fusedops
from benchmarks.bottlenecks.workloads.workload import Workload, causal_step
from benchmarks.workloads.step import VOCABULARY, words
from fusedops.demo.training import Settings, batches, build_model

__all__ = ["make_llama", "make_qlora"]

BATCH, LENGTH, BATCHES = 2, 128, 256
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
RANK = 16


def make_llama() -> Workload:
    settings = Settings()
    model = build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)

    return Workload(
        f"The demo's Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters "
        f"is trained on the standard library's bytes: {settings.batch} x {settings.length} tokens "
        "a batch, bfloat16, AdamW.",
        causal_step(model, optimizer),
        batches(settings),
        model,
        optimizer,
    )


def make_qlora() -> Workload:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES, **HEADS)).bfloat16()
    fusedops.quantize(plain, "nf4")
    adapters = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(plain, adapters).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    return Workload(
        f"A Llama with nf4 weights is trained through LoRA adapters of rank {RANK} on words of the "
        f"standard library's source: {BATCH} x {LENGTH} tokens a batch, bfloat16, AdamW of "
        f"{sum(p.numel() for p in trained) / 1e6:.1f}M adapters' parameters.",
        causal_step(model, optimizer),
        DataLoader(words(BATCH * BATCHES, LENGTH), BATCH, shuffle=True),
        model,
        optimizer,
    )
