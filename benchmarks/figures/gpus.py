"""Tables of the results that were measured on GPUs, for docs/benchmarks.md."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.figures.results import WARNING
from benchmarks.harness import sources

NOT_YET = "No figure has been measured on a GPU yet: `make gpu` measures them on one.\n"

# Column -> its contenders. Each operation has one of them.
RIVALS = {
    "eager": ("eager",),
    "Hugging Face": ("huggingface",),
    "torch.compile": ("compile(huggingface)", "compile(eager)"),
    "Liger": ("liger",),
    "Apex": ("apex",),
    "QuACK": ("quack",),
    "torch fused": ("torch fused",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
}

SPEEDS = {
    "device": "device time",
    "host": "host time of few tokens",
    "graph": "device time of few tokens in a graph",
}


def figures(results: Path) -> str:
    """Returns all tables for all GPUs, from complete files; a sentence if there is none."""
    return "\n".join(section(path, document) for path, document in complete(results)) or NOT_YET


def complete(results: Path) -> Iterator[tuple[Path, dict]]:
    """The files of whole families; a part must not stand for a family."""
    for path in sorted(results.glob("*/*.json")):
        document = json.loads(path.read_text())
        if document.get("complete"):
            yield path, document


def stale(document: dict) -> bool:
    """Whether the sources are no longer those that were measured, or were not recorded."""
    found = document["environment"].get("sources")
    return not found or bool(sources.changed(found, "cuda"))


def section(path: Path, document: dict) -> str:
    """Returns one family's results on one device."""
    where, limits = document["environment"], document["ceilings"]
    if where["commit"] is None:
        raise SystemExit(f"{path}: of no known commit; set FUSEDOPS_COMMIT and measure again")
    copy, matmul = limits["copy"]["gb_per_s"], limits["matmul"]["tflop_per_s"]
    text = [
        f"{path.stem} on {where['device']}: driver {where['driver']}, torch {where['torch']}, "
        f"triton {where['triton']}, commit {where['commit']}, {where['date'][:10]}. In the same "
        f"run a copy moved {copy:.0f} GB/s and a bfloat16 matrix product reached {matmul:.0f} "
        f"TFLOP/s. "
        f"File: `benchmarks/results/{path.parent.name}/{path.name}`.",
    ]
    text += [f"*{WARNING.capitalize()}, at commit `{where['commit']}`.*"] * stale(document)
    rows = [row for row in document["rows"] if row["status"] == "timed"]
    tables = (bandwidth(rows), *(speed(rows, clock) for clock in SPEEDS))
    return "\n\n".join(text + ["\n".join(table) for table in tables if table]) + "\n"


def bandwidth(rows: list[dict]) -> list[str]:
    """Percent of a copy of the same bytes, one column per width."""
    mine = list(named("fusedops", on("device", rows)))
    shapes = sorted({tuple(row["shape"]) for row in mine})
    header = ["bandwidth, % of a copy of the same bytes", *(str(list(shape)) for shape in shapes)]
    cells = {(work(row), tuple(row["shape"])): f"{row['percent_of_copy']:.0f}" for row in mine}
    lines = [[name, *(cells.get((name, s), "") for s in shapes)] for name in works(mine)]
    return markdown(header, lines)


def speed(rows: list[dict], clock: str) -> list[str]:
    """Speedup over each rival, the range over the shapes; medians of one run."""
    timed = list(on(clock, rows))
    present = {row["contender"] for row in timed}
    rivals = {title: names for title, names in RIVALS.items() if present & set(names)}
    lines = [
        [name, *(span(name, names, timed) for names in rivals.values())]
        for name in works(named("fusedops", timed))
    ]
    return markdown([f"times as fast in {SPEEDS[clock]} as", *rivals], lines)


def span(name: str, contenders: tuple[str, ...], rows: list[dict]) -> str:
    of_work = [row for row in rows if work(row) == name]
    mine = {tuple(row["shape"]): row["median_s"] for row in named("fusedops", of_work)}
    theirs = [row for title in contenders for row in named(title, of_work)]
    found = [row["median_s"] / mine[s] for row in theirs if (s := tuple(row["shape"])) in mine]
    return least_and_most(found, ".2f", "x") if found else ""


def least_and_most(values: list[float], form: str, unit: str = "") -> str:
    shown = (f"{value:{form}}{unit}" for value in (min(values), max(values)))
    return " .. ".join(dict.fromkeys(shown))


def on(clock: str, rows: Iterable[dict]) -> Iterator[dict]:
    return (row for row in rows if row["clock"] == clock)


def named(contender: str, rows: Iterable[dict]) -> Iterator[dict]:
    return (row for row in rows if row["contender"] == contender)


def work(row: dict) -> str:
    return f"`{row['operation']}` {row['mode']}, {row['dtype']}"


def works(rows: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(work(row) for row in rows))


def markdown(header: list[str], lines: list[list[str]]) -> list[str]:
    """Returns a table; empty if it has no lines."""
    rows = [header, ["---"] * len(header), *lines]
    return [f"| {' | '.join(row)} |" for row in rows] if lines else []
