"""Child script of tests/patching/models/test_loss_training.py: checks the fused loss on 2 ranks.

`python -m children.sharded_loss RANK RANKS FILE CASES FOLDER` in tests/ is one rank's process.
The unpatched, whole model says what loss, logits and gradients are.
"""

import sys

import torch
import torch.distributed as dist
from patching.models.loss_cases import OTHERS, SIZES, gradients, made, patched
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from children.ranks import group
from fusedops.patching import fuse_always, patch

RANKS = 2


def build(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | more))


def batch(rank):
    return torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(rank))


def step(model, rank, logits_factor=0.0):
    """Returns the outputs and the tensor to differentiate."""
    outputs = model(input_ids=batch(rank), labels=batch(rank))
    if not logits_factor:
        return outputs, outputs.loss
    return outputs, outputs.loss + logits_factor * outputs.logits.square().mean()


def expected_grads(**options):
    """Returns the mean gradient over the ranks' batches."""
    model = build(tie_word_embeddings=options.pop("tied", False))
    loss = sum(step(model, rank, **options)[1] for rank in range(RANKS)) / RANKS
    return gradients(model, loss)


def check(model, rank, tolerance=None, **options):
    grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    for name, gradient in expected_grads(**options).items():
        whole = grads[name].full_tensor() if isinstance(grads[name], DTensor) else grads[name]
        torch.testing.assert_close(whole, gradient, **tolerance or {}, msg=lambda m, n=name: n + m)


def shard(model, head=False, **options):
    mesh = init_device_mesh("cpu", (RANKS,))
    mesh_options = {"mesh": mesh} | (
        {"mp_policy": options.pop("mp_policy")} if "mp_policy" in options else {}
    )
    for part in [*model.model.layers, *([model.lm_head] if head else [])]:
        fully_shard(part, reshard_after_forward=True, **mesh_options)
    return fully_shard(model, **mesh_options, **options)


def ddp(rank):
    for unused in (False, True):
        for static in (False, True):
            for logits_factor in (0.0, 0.5):
                model = patched(build())
                kwargs = {"find_unused_parameters": unused, "static_graph": static}
                both = DistributedDataParallel(model, **kwargs)
                for _ in range(2):
                    model.zero_grad()
                    outputs, loss = step(both, rank, logits_factor)
                    assert made(outputs) == bool(logits_factor)
                    loss.backward()
                check(model, rank, logits_factor=logits_factor)


def fsdp(rank):
    """The head gathered by itself and with the model around it, resharded or not, and read."""
    for head in (False, True):
        for reshard in ({}, {"reshard_after_forward": True}):
            for logits_factor in (0.0, 0.5):
                model = shard(patched(build()), head, **reshard)
                for _ in range(2):
                    model.zero_grad()
                    outputs, loss = step(model, rank, logits_factor)
                    assert made(outputs) == bool(logits_factor)
                    loss.backward()
                check(model, rank, logits_factor=logits_factor)
                whole = build()(batch(rank)).logits
                torch.testing.assert_close(outputs.logits.detach(), whole.detach())


def fsdp_tied(rank):
    model = shard(patched(build(tie_word_embeddings=True)))
    outputs, loss = step(model, rank)
    loss.backward()
    assert not made(outputs)
    check(model, rank, tied=True)


def fsdp_then_patch(rank):
    model = patched(shard(build(), head=True))
    outputs, loss = step(model, rank)
    loss.backward()
    assert not made(outputs)
    check(model, rank)


def everything(rank):
    """All kinds of site, before and after the wrapper, with the norms that a step shows."""

    def ours():
        model = build()
        patch(model)
        return model

    def after(wrapped):
        patch(wrapped)
        return wrapped

    makes = lambda: DistributedDataParallel(ours()), lambda: after(DistributedDataParallel(build()))
    for make in (*makes, lambda: shard(ours()), lambda: after(shard(build()))):
        model = make()
        for _ in range(3):
            model.zero_grad()
            step(model, rank)[1].backward()
        check(model, rank)


def fsdp_in_bfloat16(rank):
    """With a policy that casts what comes from the head: to float32, and to bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=dtype)
        model = shard(patched(build()), head=True, mp_policy=policy)
        outputs, loss = step(model, rank)
        assert made(outputs) == (dtype == torch.bfloat16)
        loss.backward()
        check(model, rank, {"rtol": 0.1, "atol": 2e-3})


def fsdp_eval(rank):
    for reshard in ({}, {"reshard_after_forward": True}):
        model = shard(patched(build()), **reshard).eval()
        with torch.no_grad():
            outputs, loss = step(model, rank)
            whole = build().eval()(batch(rank), labels=batch(rank))
        torch.testing.assert_close(loss, whole.loss)
        assert not made(outputs)
        torch.testing.assert_close(outputs.logits, whole.logits)


def stepped(rank):
    """Logits of sharded weights that were stepped in between are refused on every rank."""
    model = shard(patched(build()), reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs, loss = step(model, rank)
    loss.backward()
    optimizer.step()
    try:
        outputs.logits.sum()
    except RuntimeError as error:
        assert "changed after the forward, before outputs.logits was read" in str(error)
    else:
        raise AssertionError("they were read")


def stepped_and_kept(rank):
    """The logits that the forward computed, for a head gathered alone and with its model."""
    for head in (False, True):
        model = build()
        patch(model, **OTHERS, loss="keep_logits")
        model = shard(model, head, reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs, loss = step(model, rank)
        loss.backward()
        check(model, rank)
        optimizer.step()
        torch.testing.assert_close(outputs.logits.detach(), build()(batch(rank)).logits.detach())


def collectives(rank):
    model = patched(build())
    whole = [build()(batch(r)).logits.detach() for r in range(RANKS)]
    with torch.no_grad():
        gathered = [torch.empty(2, 8, 64) for _ in range(RANKS)]
        dist.all_gather(gathered, step(model, rank)[0].logits)
        torch.testing.assert_close(gathered, whole)
        summed = step(model, rank)[0].logits
        dist.all_reduce(summed)
        torch.testing.assert_close(summed + 0, sum(whole))


def main(rank, ranks, meeting, cases, folder):
    with group(rank, ranks, meeting), fuse_always():  # so few logits too are not made in bfloat16
        for case in cases.split(","):
            globals()[case](int(rank))
            print(case, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
