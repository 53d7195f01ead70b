"""Child script of tests/quantized_linear/test_sharded.py: QLoRA training and checkpoints on ranks.

`python -m children.sharded_qlora RANK RANKS FILE CASES FOLDER` in tests/ is one rank's process. A
model that one process quantizes and trains says what the losses, gradients and codes are.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from patching.models import experts_cases
from patching.models.loss_cases import SIZES
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops
from children.ranks import group
from fusedops.nn import codes_as_buffers, codes_as_parameters
from fusedops.nn.quantized_linear.codes import Codes
from fusedops.optim import AdamW
from fusedops.patching import fuse_always


def llama(format):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 192}))
    return with_adapters(fusedops.quantize(model, format) and model)


def mixture(format):
    model = experts_cases.build("qwen3_moe", num_experts=5)
    return with_adapters(fusedops.quantize(model, format) and model)


def with_adapters(model):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(model, lora)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zero in peft, and then lora_A has no gradient
                p.normal_(std=0.1)
    return model.train()


def sharded(model, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    codes_as_parameters(model)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def ids(step):
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(step))


def train(model, optimizer, first, steps):
    """The same batch on every rank; returns the losses."""
    losses = []
    for i in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids(i), labels=ids(i), use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def optimizer_of(model, **options):
    """Its 8-bit blocks end where a shard ends, so only float32 states are those of one process."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, lr=1e-2, **options)


EIGHT_BIT = {"state_dtype": "int8", "min_8bit_size": 100}


def code_bytes(model):
    """Bytes of the codes and scales that this process holds."""
    held = 0
    for module in model.modules():
        if isinstance(module, Codes):
            tensors = [module._held(name) for name in module._code_names()]
            held += sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
    return held


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


FORMATS = "int8", "int4", "nf4", "fp8"


def as_one_process(folder):
    """Losses, gradients and steps; each rank keeps its part of the codes."""
    ranks = dist.get_world_size()
    for build, format in (*((llama, format) for format in FORMATS), (mixture, "nf4")):
        whole, ours = build(format), build(format)
        for model in (ours, whole):
            fusedops.patch(model)
        ours = sharded(ours)
        assert code_bytes(ours) <= code_bytes(whole) / ranks * 1.1 + 64
        losses = train(ours, optimizer_of(ours), 0, 3)
        torch.testing.assert_close(losses, train(whole, optimizer_of(whole), 0, 3))
        expected = {name: p.grad for name, p in whole.named_parameters() if p.requires_grad}
        for name, p in ours.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(full(p.grad), expected[name], rtol=1e-3, atol=1e-5)


def patched_after(folder):
    whole = llama("nf4")
    ours = sharded(llama("nf4"))
    fusedops.patch(ours)
    expected = train(whole, optimizer_of(whole), 0, 2)
    torch.testing.assert_close(train(ours, optimizer_of(ours), 0, 2), expected)


def mixed_precision(folder):
    """param_dtype casts the adapters and norms, and no scale."""
    whole = llama("nf4")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ours = sharded(llama("nf4"), mp_policy=policy)
    loss = ours(input_ids=ids(0), labels=ids(0), use_cache=False).loss
    expected = whole(input_ids=ids(0), labels=ids(0), use_cache=False).loss
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


def ddp(folder):
    """Its ranks have copies of the codes, and send none of them in a forward."""
    whole, ours = llama("nf4"), codes_as_parameters(llama("nf4"))
    wrapped = DistributedDataParallel(ours)
    assert not {"qweight", "absmax"} & {n.split(".")[-1] for n, _ in wrapped.named_buffers()}
    losses = train(wrapped, optimizer_of(ours), 0, 3)
    torch.testing.assert_close(losses, train(whole, optimizer_of(whole), 0, 3))


def sharded_codes_stay(folder):
    """They can be read, and exported bit for bit. They cannot be written or made buffers."""
    whole, ours = llama("nf4"), sharded(llama("nf4"))
    first = ours.get_base_model().model.layers[0]
    layer = first.mlp.up_proj
    same = whole.get_base_model().model.layers[0].mlp.up_proj
    assert torch.equal(layer.weight + 0, same.weight + 0)
    refuses(layer.weight.data.zero_, "qweight must be whole to be written, got a shard")
    refusal = "codes_as_buffers: model must hold whole codes, got one that fully_shard took"
    refuses(lambda: codes_as_buffers(ours), refusal)
    refuses(lambda: codes_as_buffers(layer), refusal)
    before = ours(input_ids=ids(0), use_cache=False).logits
    first.unshard()  # its codes are whole now, but FSDP2 still manages them
    refuses(lambda: codes_as_buffers(first), refusal)
    first.reshard()
    assert torch.equal(ours(input_ids=ids(0), use_cache=False).logits, before)
    state = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        other = zeroed(llama("nf4"))
        other.load_state_dict(state)
        assert all(torch.equal(b, whole.get_buffer(n)) for n, b in other.named_buffers())


def requires_grad_of_a_model(folder):
    """Skips the codes, while a layer's are gathered and afterwards."""
    ours = sharded(llama("nf4"))
    layer = ours.get_base_model().model.layers[0]
    ours(input_ids=ids(0), use_cache=False)
    layer.unshard()
    for _ in ("gathered", "sharded"):
        for on in (False, True):
            ours.requires_grad_(on)
            for p in ours.parameters():
                assert p.requires_grad == (on and p.is_floating_point())
        layer.reshard()


def refuses(run, reason):
    try:
        run()
    except RuntimeError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"no error that says {reason!r}")


def zeroed(model):
    for t in model.state_dict().values():
        t.zero_()
    return model


def checkpoints_of_one_process(folder):
    """One process's checkpoint is sharded; a sharded one is served. By the docstring's steps."""
    whole = llama("nf4")
    expected = whole(input_ids=ids(0), use_cache=False).logits
    dcp.save(whole.state_dict(), checkpoint_id=folder / "buffers")
    ours = zeroed(llama("nf4"))
    state = ours.state_dict()
    dcp.load(state, checkpoint_id=folder / "buffers")
    ours.load_state_dict(state)
    ours = sharded(ours)
    torch.testing.assert_close(ours(input_ids=ids(0), use_cache=False).logits, expected)

    dcp.save(get_model_state_dict(ours), checkpoint_id=folder / "shards")
    served = zeroed(codes_as_parameters(llama("nf4")))
    state = served.state_dict()
    dcp.load(state, checkpoint_id=folder / "shards")
    served.load_state_dict(state)
    codes_as_buffers(served)
    assert all(torch.equal(b, whole.get_buffer(n)) for n, b in served.named_buffers())
    assert torch.equal(served(input_ids=ids(0), use_cache=False).logits, expected)


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def begun(build):
    """In bfloat16, whose steps round by chance."""
    model = sharded(build("nf4").bfloat16())
    return model, optimizer_of(model, **EIGHT_BIT)


def save(folder):
    """After three steps. Keeps the numbers, and the losses of the steps that follow."""
    for build in (llama, mixture):
        model, optimizer = begun(build)
        train(model, optimizer, 0, 3)
        dcp.save(state_of(model, optimizer), checkpoint_id=folder / build.__name__)
        whole = {n: full(p.detach()) for n, p in model.named_parameters()}
        losses = train(model, optimizer, 3, 3)
        if dist.get_rank() == 0:
            torch.save((dist.get_world_size(), whole, losses), folder / f"{build.__name__}.pt")


def load(folder):
    """On any number of ranks: the same codes and adapters. On as many: the same bits of losses."""
    for build in (llama, mixture):
        model, optimizer = begun(build)
        with torch.no_grad():
            for p in model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).zero_()
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder / build.__name__)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        ranks, whole, losses = torch.load(folder / f"{build.__name__}.pt")
        for name, p in model.named_parameters():
            assert torch.equal(full(p.detach()), whole[name]), name
        after = train(model, optimizer, 3, 3)
        if ranks == dist.get_world_size():
            assert torch.equal(after, losses), (after, losses)
        else:
            torch.testing.assert_close(after, losses, rtol=1e-2, atol=0)


class KilledAtWriting(DefaultSavePlanner):
    """Ends the second rank's process at its tenth tensor, as `kill -9` does."""

    left = 10

    def resolve_data(self, write_item):
        self.left -= 1
        if self.left == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def killed(folder):
    """Goes on from the checkpoint, and dies while it saves the next one."""
    model, optimizer = begun(llama)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder / "llama")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    train(model, optimizer, 3, 1)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder / "next", planner=KilledAtWriting())


def main(rank, ranks, meeting, cases, folder):
    with group(rank, ranks, meeting), fuse_always():
        for case in cases.split(","):
            print(f"case {case}", flush=True)
            globals()[case](Path(folder))
            dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
