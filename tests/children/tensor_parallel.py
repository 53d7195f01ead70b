"""Child script of tests/integrations/test_tensor_parallel.py: patched models on 2 and 4 ranks.

`python -m children.tensor_parallel FOLDER` in tests/. Forked ranks, 2 and then 4, distribute tiny
models by transformers' own plans. The unpatched model of one process says what is right.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from children.ranks import group
from fusedops.patching import fuse_always, patch, unpatch
from fusedops.patching.yardstick import GRADIENT, Yardstick

SIZES = {
    **{"vocab_size": 65, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "llama": SIZES,
    "gemma2": {**SIZES, "query_pre_attn_scalar": 8},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, **MIXTURE, "num_experts": 4},
}
MIXTURES = "mixtral", "qwen3_moe"
ON_FOUR_RANKS = "llama", "qwen3_moe"
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
        **{"loss": full(output.loss).detach(), "logits": full(output.logits).detach()},
        **{
            "loss without gradients": full(again.loss),
            "logits without gradients": full(again.logits),
        },
        **gradients,
    }


def alone(path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


def by_tensors(ranks):
    return DistributedConfig(tp_plan="auto", tp_size=ranks)


def by_experts(ranks):
    return DistributedConfig(tp_size=ranks, ep_size=ranks)


def loaded(path, plan):
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=plan).eval()


def distributed(model, plan):
    """Distributes a model that is already there, as from_pretrained does before it loads."""
    config, _, mesh = type(model).prepare_distribute_model(plan)
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
        self.expected = results(self.whole, BATCH)
        patched = alone(self.path)
        self.coverage = patch(patched).coverage
        self.kernels = self._run(patched)[1]

    def _run(self, model):
        """(results, the kernel operators that ran).

        The loss of a head that gathers its logits is made of them, and has a backward of its own.
        """
        with torch.profiler.profile() as seen:
            actual = results(model, BATCH)
        names = {event.name for event in seen.events() if event.name.startswith("fusedops::")}
        names = {name.replace("linear_cross", "cross") for name in names}
        return actual, names - {"fusedops::cross_entropy_backward"}

    def check(self, model, without=()):
        """By the yardstick on rank 0, which takes many runs; the other ranks get the same.

        without: operators that do not run.
        """
        actual, kernels = self._run(model)
        assert kernels == self.kernels - {*without}, kernels ^ self.kernels
        if dist.get_rank() == 0:
            assert not (off := self.yardstick.off(actual, self.whole)), off
        torch.testing.assert_close(actual, self.expected, rtol=1e-4, atol=1e-5)


def patched_after(case, ranks, plan=by_tensors):
    model = loaded(case.path, plan(ranks))
    report = patch(model)
    assert report.coverage == case.coverage, report
    case.check(model)
    unpatch(model)
    with torch.profiler.profile() as seen, torch.no_grad():
        logits = model(**BATCH).logits
    assert not any(event.name.startswith("fusedops::") for event in seen.events())
    torch.testing.assert_close(logits, case.expected["logits"], rtol=1e-4, atol=1e-5)


def patched_before(case, ranks, plan=by_tensors):
    model = alone(case.path)
    patch(model)
    case.check(distributed(model, plan(ranks)))


def compiled(case, ranks):
    model = loaded(case.path, by_tensors(ranks))
    patch(model)
    run = torch.compile(model, backend="aot_eager")
    with torch.profiler.profile() as seen:
        loss = run(**BATCH).loss
        loss.backward()
    names = {event.name for event in seen.events()}
    assert {"fusedops::norm_forward", "fusedops::attention_backward"} <= names, names
    actual = {GRADIENT + n: full(p.grad) for n, p in model.named_parameters()}
    actual["loss"] = full(loss).detach()
    expected = {name: case.expected[name] for name in actual}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def by_experts_after(case, ranks):
    patched_after(case, ranks, by_experts)


def by_experts_before(case, ranks):
    patched_before(case, ranks, by_experts)


def by_torchs_plan(case, ranks):
    """Sequence parallel: DTensors between the layers, and logits sharded over the vocabulary."""
    mesh, sequence = init_device_mesh("cpu", (ranks,)), Shard(1)
    whole = {"use_local_output": False}
    inner = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sequence},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
        **{f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        **{f"mlp.{n}_proj": ColwiseParallel(**whole) for n in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(output_layouts=sequence, **whole),
        "mlp.down_proj": RowwiseParallel(output_layouts=sequence, **whole),
    }
    outer = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=sequence, **whole
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=sequence, **whole),
    }
    for before in (True, False):
        model = alone(case.path)
        if before:
            patch(model)
        parallelize_module(model, mesh, outer)
        for layer in model.model.layers:
            parallelize_module(layer, mesh, inner)
        report = patch(model)
        assert report.coverage == case.coverage, report
        case.check(model, without=["fusedops::add_rms_norm"])  # its norms have hooks


def work(rank, ranks, meeting, cases):
    with group(rank, ranks, meeting):
        for case in cases:
            check_all(case, rank, ranks)


def check_all(case, rank, ranks):
    checks = [patched_after]
    if ranks == 2 and "tied" not in case.name:
        checks.append(patched_before)
    if ranks == 2 and case.name == "llama":
        checks += [by_torchs_plan, compiled]
    if ranks == 2 and case.name in MIXTURES:
        checks += [by_experts_after, by_experts_before]
    for check in checks:
        check(case, ranks)
        print(f"{check.__name__} {case.name} rank {rank} of {ranks}\n", end="", flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with fuse_always():
        cases = [Case(name, sizes, folder) for name, sizes in MODELS.items()]
        tied = Case("gemma2", TIED, folder)
        on_four = [case for case in cases if case.name in ON_FOUR_RANKS]
        for ranks, chosen in ((2, [*cases, tied]), (4, on_four)):
            arguments = ranks, folder / f"meeting-{ranks}", chosen
            mp.start_processes(work, arguments, nprocs=ranks, start_method="fork")
