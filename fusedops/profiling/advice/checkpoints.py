"""Advice on activation checkpointing: which blocks, and the memory saved for the time spent."""

from collections.abc import Iterator, Sequence

from fusedops.measuring.units import bytes_text
from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.collect.blocks import may_checkpoint
from fusedops.profiling.evidence import Block, Evidence
from fusedops.profiling.judge import Verdict

__all__ = ["checkpoint", "fitting", "worthwhile"]

REST = 0.02  # of what all blocks together save: the last blocks are left out if they add less

FORMULA = (
    "bytes: the step's peak - its peak in which what the blocks keep for backward, apart from "
    "inputs and results, is freed after their forward and there again in their backward; seconds: "
    "- the time of the blocks' forwards, which run twice"
)


def checkpoint(evidence: Evidence, verdict: Verdict) -> Iterator[Advice]:
    """Where saved activations are a large part of the peak."""
    memory, blocks = evidence.memory, worthwhile(evidence)
    if memory is None or not may_checkpoint(memory) or not blocks:
        return
    share = memory["activations"] / memory["peak"]
    yield Advice(
        "checkpoint",
        f"activation checkpointing of {len(blocks)} blocks",
        f"what is saved for backward takes {share:.0%} of the peak; {_rates(blocks)}",
        _how(evidence, blocks),
        "the step becomes slower; results are the same, dropout included; BatchNorm's running "
        "statistics are updated twice",
        FORMULA,
        Saving(
            seconds=-sum(block.seconds for block in blocks),
            bytes=memory["peak"] - blocks[-1].peak,
        ),
    )


def worthwhile(evidence: Evidence) -> tuple[Block, ...]:
    """The blocks in order, up to the one after which the peak falls no further."""
    blocks, memory = evidence.blocks, evidence.memory
    if memory is None or not blocks:
        return ()
    lowest = min(block.peak for block in blocks)
    enough = lowest + REST * (memory["peak"] - lowest)
    if lowest >= memory["peak"]:
        return ()
    return blocks[: 1 + next(i for i, block in enumerate(blocks) if block.peak <= enough)]


def fitting(evidence: Evidence, budget: int) -> tuple[Block, ...]:
    """The fewest blocks with which a step's peak is within a budget.

    Raises ValueError if there are none, or if no block was measured.
    """
    memory = evidence.memory
    if memory is None:
        raise ValueError("profile: checkpoints needs the memory of a step, which was not measured")
    if memory["peak"] <= budget:
        return ()
    if not evidence.blocks:
        raise ValueError(
            "profile: checkpoints needs measured blocks: saved activations are below 40 % of the "
            "peak, or see verdict.not_checked"
        )
    for count, block in enumerate(evidence.blocks, 1):
        if block.peak <= budget:
            return evidence.blocks[:count]
    lowest = min([memory["peak"], *(block.peak for block in evidence.blocks)])
    raise ValueError(
        f"profile: budget must be at least {lowest} bytes, the lowest peak with checkpointing, "
        f"got {budget}"
    )


def _rates(blocks: Sequence[Block]) -> str:
    """Bytes of a block by its added millisecond; of the best and of the last one."""
    rates = [block.saved / max(1e-6, 1e3 * block.seconds) for block in (blocks[0], blocks[-1])]
    texts = [f"{bytes_text(round(rate))} for each added ms" for rate in rates]
    if blocks[0].saved == blocks[-1].saved:
        return f"each block gives {texts[0]}"
    return f"{blocks[0].name} gives {texts[0]}, {blocks[-1].name} {texts[1]}"


def _how(evidence: Evidence, blocks: Sequence[Block]) -> str:
    method = evidence.about.get("checkpointing")
    if method:
        return f"model.{method}() for all blocks; report.checkpoints(budget) names fewer"
    names = ", ".join(block.name for block in blocks[:2])
    call = "torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)"
    return f"{call} for {names} and so on, in the order of report.checkpoints(budget)"
