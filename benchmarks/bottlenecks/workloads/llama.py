"""A training loop of the demo's Llama on the source bytes of Python's standard library."""

import torch

from benchmarks.bottlenecks.workloads.workload import Workload, causal_step
from fusedops.demo.training import Settings, batches, build_model

__all__ = ["make"]


def make() -> Workload:
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
