"""Renders docs/sweep_models.md from the results of the benchmark `sweep`."""

from collections.abc import Iterator

from benchmarks.figures.results import Result
from fusedops.measuring.units import bytes_text, seconds_text
from fusedops.sweeping.row import SweepRow

__all__ = ["PAGE", "STEM", "page"]

PAGE = "docs/sweep_models.md"
STEM = "sweep"
HEADER = """# Training steps of four models, patched and unpatched

`python -m benchmarks sweep` writes this page, with [`fusedops.sweep`](guides/sweep.md). The models
have random weights from configs, about 20 million parameters and {words} words; a step is
`zero_grad`, forward, backward and torch's AdamW on sequences of {length} tokens. "times as fast" is
the median of paired ratios, patched over eager, with its 95 % interval.
"""


def page(result: Result) -> str:
    """The page, from the benchmark's result."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    document = result.document
    settings = document["settings"]
    yield HEADER.format(words=settings["words"], length=settings["length"])
    yield f"{result.machine}, {result.date}, commit `{result.commit}`.\n"
    for goal in document["goals"]:
        met = "met" if goal["met"] else "missed"
        yield f"- {goal['title']}: {goal['measured']:.2f}, asked {goal['asked']:.2f}, {met}"
    for name, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in document["rows"]):
        same = [r for r in document["rows"] if (r["model"], r["dtype"]) == (name, dtype)]
        yield f"\n## {name}, {dtype}\n"
        yield f"![Latency against throughput, {name}, {dtype}](images/sweep-{name}-{dtype}.svg)\n"
        yield "| batch | eager | patched | times as fast | tokens/s, patched | peak, patched |"
        yield "| --: | --: | --: | --: | --: | --: |"
        yield from _table([SweepRow.from_dict(row) for row in same])


def _table(rows: list[SweepRow]) -> Iterator[str]:
    for batch in dict.fromkeys(row.batch for row in rows):
        eager, patched = (row for row in rows if row.batch == batch)
        if eager.p50 is None or patched.p50 is None:
            yield f"| {batch} | {eager.skipped_reason or patched.skipped_reason} | | | | |"
            continue
        times = f"{seconds_text(eager.p50)} | {seconds_text(patched.p50)} | {patched.ratio}"
        noisy = " (noisy)" if eager.noisy or patched.noisy else ""
        peak = bytes_text(patched.peak_bytes or 0)
        yield f"| {batch} | {times}{noisy} | {patched.tokens_per_s:,.0f} | {peak} |"
