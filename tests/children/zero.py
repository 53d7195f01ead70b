"""Child script of tests/integrations/test_deepspeed.py: trains patched models under ZeRO.

`python -m children.zero RANK RANKS FILE STAGES FOLDER` in tests/ is one rank's process.
DeepSpeed's ZeRO trains a patched model by fused AdamW, and the unpatched model by torch's.
"""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from patching.models.experts_cases import build
from patching.models.loss_cases import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops
from children import sharded_qlora
from children.ranks import group
from fusedops.nn import QuantizedLinear, codes_as_parameters
from fusedops.patching import fuse_always

STEPS = 4


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixture():
    return build("qwen3_moe")


def qlora():
    """Adapters over nf4 codes, which ZeRO-3 shards as parameters."""
    model = sharded_qlora.llama("nf4")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.compute = "exact"  # no rounding to bfloat16, in which a patch's would grow
    return codes_as_parameters(model)


def trained(stage, model, optimizer, patched=""):
    """A rank's losses, and the parameters. patched: "before" or "after" DeepSpeed wraps the model.

    With a large eps, the rounding of a small gradient stays small in its step.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if patched == "before":
        fusedops.patch(model)
    learned = [p for p in model.parameters() if p.requires_grad]
    client_optimizer = optimizer(learned, lr=1e-2, eps=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=client_optimizer, config=config)[0]
    if stage == 3:
        assert all(p.ds_tensor.numel() < p.ds_numel for p in engine.module.parameters())
    if patched == "after":
        fusedops.patch(engine)
    losses = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(9 * step + dist.get_rank())
        ids = torch.randint(3, 60, (2, 9), generator=draw)
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        parameters = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    return torch.stack(losses), parameters


def main(rank, ranks, meeting, stages, folder):
    os.environ["DS_ACCELERATOR"] = "cpu"
    with group(rank, ranks, meeting), fuse_always():
        deepspeed.init_distributed("gloo")
        for stage in map(int, stages.split(",")):
            cases = (llama, "before"), (llama, "after"), (mixture, "before"), (qlora, "before")
            for make, when in cases:
                expected = trained(stage, make(), torch.optim.AdamW)
                actual = trained(stage, make(), fusedops.optim.AdamW, when)
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            print(f"ZeRO-{stage}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
