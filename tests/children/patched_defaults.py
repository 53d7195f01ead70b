"""Child script: trains patched models under each default dtype or device and saves the results.

Each default has a process of its own, forked before anything was patched: `patch` keeps what it
found out about a class, so a second probe in the same process would not run.
"""

import os
import sys
from pathlib import Path

import torch
import transformers
from contract.default_dtype_cases import BF16, DEFAULTS, F32, default
from patching.models.loss_cases import SIZES as TINY

import fusedops

SIZES = TINY | {"max_position_embeddings": 256}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", "sdpa"),
    "eager llama": ("LlamaConfig", "LlamaForCausalLM", "eager"),
    "bert": ("BertConfig", "BertForMaskedLM", "sdpa"),
}
IDS = torch.randint(3, 64, (1, 256), generator=torch.Generator().manual_seed(0))  # attention pays


def build(model, dtype):
    config, kind, attention = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**SIZES, attn_implementation=attention)
    return getattr(transformers, kind)(config).to(dtype).eval()


def step(model):
    """Returns the fused sites and a step's tensors, by name."""
    report = fusedops.patch(model, verify={"input_ids": IDS})
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {f"{name}'s gradient": p.grad for name, p in model.named_parameters()}
    fusedops.optim.AdamW8bit(model.parameters(), lr=1e-3, max_grad_norm=1.0).step()
    sites = [(site.path, site.kind) for site in report.fused]
    return sites, {"loss": loss.detach(), **gradients, **dict(model.named_parameters())}


def main(folder):
    models = {(name, dtype): build(name, dtype) for name in MODELS for dtype in (F32, BF16)}
    for name, kwargs in {"float32": {}, **DEFAULTS}.items():
        child = os.fork()
        if child == 0:
            with default(**kwargs):
                results = {of: step(model) for of, model in models.items()}
            torch.save(results, folder / f"{name}.pt")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"under {name}: exit status {status}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
