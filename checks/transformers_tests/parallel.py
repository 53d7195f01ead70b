"""Runs transformers' own tests of tensor parallelism and FSDP2, on unpatched and patched models.

`python -m checks transformers-tests --parallel`. The distribution has the tests' bodies, but not
what starts ranks and configures models: two ranks run here, over gloo, with tiny configs. The
tests of FSDP2 run for the models of transformers' own list.
"""

import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from checks.transformers_tests.plugin import Patching
from fusedops.patching import fuse_always

RANKS = 2
SIZES = {
    **{"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "head_dim": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
}
TOLERANCES = 1e-5, 1e-5  # the mixin's own

Test = Callable[[int, Path, str], None]


def run(suite: Path) -> int:
    """suite: the folder of the unpacked tests. Returns the exit status: 1 if an outcome differs."""
    sys.path[:0] = [str(suite), str(suite.parent / "packages")]
    sys.modules["transformers_suite.distributed_testing_utils"] = _starter()
    torch.set_num_threads(1)
    with fuse_always():
        plain, patched = (_outcomes(patches) for patches in (False, True))
    passed = [sum("passed" in line for line in lines) for lines in (plain, patched)]
    print(f"unpatched: {passed[0]} of {len(plain)} passed")
    print(f"patched: {passed[1]} of {len(patched)} passed")
    print(*(sorted(plain ^ patched) or ["every outcome is the same"]), sep="\n")
    return int(plain != patched or not passed[0])


def _starter() -> ModuleType:
    """A stand-in for the module that starts ranks, which the distribution lacks."""
    module: Any = ModuleType("distributed_testing_utils")
    module.run_distributed = module._start_rank_processes = None
    module._get_distributed_backend = lambda: "gloo"
    module._get_distributed_device_type = lambda: "cpu"
    module._get_rank_device = lambda rank: torch.device("cpu")
    module._set_rank_device = lambda rank: None
    return module


def _outcomes(patches: bool) -> set[str]:
    """Each test's outcome on rank 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, more in MODELS.items():
            torch.manual_seed(0)
            _class_of(model)(_config(model, more)).save_pretrained(folder / model)
        arguments = folder, patches
        torch.multiprocessing.start_processes(_work, arguments, RANKS, start_method="fork")
        return set((folder / "outcomes").read_text().splitlines())


def _config(model: str, more: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model, **SIZES, **more)


def _class_of(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return type(AutoModelForCausalLM.from_config(_config(model, MODELS[model])))


def _tests() -> Iterator[tuple[str, Test, str]]:
    """Yields (name, test, model)."""
    from transformers_suite import test_fsdp_mixin as fsdp
    from transformers_suite import test_tensor_parallel_mixin as tensor_parallel

    for name, more in (("forward", ()), ("backward", ()), ("generation", (10,))):
        body = getattr(tensor_parallel, f"_test_tp_{name}_impl")
        for model in MODELS:
            yield f"tensor parallel {name}", functools.partial(_run_checkpoint, body, more), model
    tied = {"sharding_structure": (False,), "plan_vs_ddp": (False,), "save_load": ()}
    for name, arguments in tied.items():
        body = getattr(fsdp, f"_test_fsdp2_{name}_impl")
        for model in filter(fsdp.FSDP_DISTRIBUTED_TEST_MODEL_TYPES.__contains__, MODELS):
            yield f"fsdp2 {name}", functools.partial(_run_config, body, arguments), model


def _run_checkpoint(body: Callable, more: tuple, rank: int, folder: Path, model: str) -> None:
    body(rank, folder / model, _class_of(model), *TOLERANCES, *more)


def _run_config(body: Callable, more: tuple, rank: int, folder: Path, model: str) -> None:
    config = _config(model, MODELS[model])
    body(rank, type(config), config.to_diff_dict(), *more)


def _work(rank: int, folder: Path, patches: bool) -> None:
    import torch.distributed as dist
    from transformers import PreTrainedModel

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    # If a test fails on one rank, the other ranks wait in a different collective.
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(minutes=2)
    )
    patching = Patching() if patches else SimpleNamespace(models=1, install=lambda base: None)
    patching.install(PreTrainedModel)
    passed = {}
    for name, test, model in _tests():
        try:
            test(rank, folder, model)
            passed[f"{name} {model}"] = True
        except Exception:  # noqa: BLE001  a test of another package fails with anything
            traceback.print_exc()
            passed[f"{name} {model}"] = False
        dist.barrier()
    assert patching.models, "no model was patched"
    by_rank: list[Any] = [None] * RANKS
    dist.all_gather_object(by_rank, passed)
    if rank == 0:
        on_all = {name: all(outcomes[name] for outcomes in by_rank) for name in passed}
        lines = [f"{name}: {'passed' if on_all[name] else 'failed'}" for name in on_all]
        (folder / "outcomes").write_text("\n".join(lines))
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # one of torch's threads may still run, and would abort the process
