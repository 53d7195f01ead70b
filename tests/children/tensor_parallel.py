"""Child script of tests/integrations/test_tensor_parallel.py: forks 2 ranks, then 4.

`python -m children.tensor_parallel FOLDER` in tests/. The ranks distribute tiny models by
transformers' own plans. The unpatched model of one process says what is right.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fusedops.patching import fuse_always, patch
from fusedops.patching.yardstick import GRADIENT, Yardstick

SIZES = {
    **{"vocab_size": 65, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gemma2": {**SIZES, "query_pre_attn_scalar": 8},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, **MIXTURE, "num_experts": 4},
}
# transformers cannot distribute a tied model that is already there, patched or not.
TIED = {**MODELS["gemma2"], "tie_word_embeddings": True}
IDS = torch.randint(3, 65, (2, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS.where(IDS % 5 > 0, -100), "use_cache": False}


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def results(model, batch):
    """By backward, since a plan's hooks on parameters do not see torch.autograd.grad."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = {GRADIENT + n: full(p.grad) for n, p in model.named_parameters()}
    with torch.no_grad():
        again = model(**batch)
    return {
        **{"loss": output.loss.detach(), "logits": full(output.logits).detach()},
        **{"loss without gradients": again.loss, "logits without gradients": full(again.logits)},
        **gradients,
    }


def alone(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def loaded(path, ranks):
    config = DistributedConfig(tp_plan="auto", tp_size=ranks)
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=config).eval()


def distributed(model, ranks):
    """Distributes a model that is already there, as from_pretrained does before it loads."""
    config = DistributedConfig(tp_plan="auto", tp_size=ranks)
    config, _, mesh = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model, config, mesh)


class Case:
    """A model: its checkpoint, one process's results, and how far rounding moves them."""

    def __init__(self, name, sizes, folder):
        self.name = name + " tied" * sizes["tie_word_embeddings"]
        self.path = folder / self.name
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(self.path)
        self.whole = alone(self.path)
        self.yardstick = Yardstick(self.whole, BATCH, results)
        self.wanted = results(self.whole, BATCH)
        self.coverage = patch(alone(self.path)).coverage

    def check(self, model):
        """By the yardstick on rank 0, which takes many runs; the other ranks get the same."""
        found = results(model, BATCH)
        if dist.get_rank() == 0:
            assert not (off := self.yardstick.off(found, self.whole)), off
        torch.testing.assert_close(found, self.wanted, rtol=1e-4, atol=1e-5)


def patched_after(case, ranks):
    model = loaded(case.path, ranks)
    report = patch(model)
    assert report.coverage == case.coverage, report
    case.check(model)


def patched_before(case, ranks):
    model = alone(case.path)
    patch(model)
    case.check(distributed(model, ranks))


def work(rank, ranks, meeting, cases):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=ranks)
    for case in cases:
        checks = (
            [patched_after] if ranks > 2 or "tied" in case.name else [patched_after, patched_before]
        )
        for check in checks:
            check(case, ranks)
            print(f"{check.__name__} {case.name} rank {rank} of {ranks}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # now and then a thread of torch's is still there, and ends the process by an abort


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with fuse_always():
        cases = [Case(name, sizes, folder) for name, sizes in MODELS.items()]
        cases.append(Case("gemma2", TIED, folder))
        for ranks in (2, 4):
            arguments = ranks, folder / f"meeting-{ranks}", cases
            mp.start_processes(work, arguments, nprocs=ranks, start_method="fork")
