"""Formats docs/machine_code.md, and finds where a committed page differs from new results.

The page has a section per compiler and a row per kernel. A cell shows one value per architecture,
or one value if they agree.
"""

import re
from collections.abc import Sequence

from checks.machine_code.gates import EXCUSES, Compiled, Excuse

HEAD = """# Machine code

This page shows the machine code of every GPU kernel. `make cuda-check` writes it, without a GPU. It
fails if a kernel spills registers or uses local memory, or if it does not access global memory as
its family requires: 16 bytes at a time, and no more often than necessary.

A cell shows the values for {architectures}, or one value if they agree.
Registers are per thread. Shared memory is in bytes per block, without what a CUDA launch adds.
Spills are instructions that load or store local memory; local memory is in bytes per thread. Loads
and stores are instructions that access 16 bytes of global memory, counted in the code. A Triton row
covers all tiles for a range of row lengths n, from the lowest value to the highest; n is ragged if
16 does not divide it. Ragged rows of a norm have no 16-byte accesses. Ragged rows of cross entropy
use them for everything between the first aligned vector and the last.
"""
TITLES = ("kernel", "registers", "shared", "spills", "local", "loads", "stores", "tensor cores")
FACTS = ("registers", "shared", "spills", "local", "loads", "stores", "tensor_cores")


def document(kernels: Sequence[Compiled], excuses: Sequence[Excuse] = EXCUSES) -> str:
    architectures = list(dict.fromkeys(kernel.arch.rstrip("a") for kernel in kernels))
    parts = [HEAD.format(architectures=" / ".join(architectures))]
    parts += [f"## {compiler}\n\n{text}\n" for compiler, text in sections(kernels).items()]
    if excuses:
        lines = [_line("kernel", "architecture", "spills at most", "reason")]
        lines += [_line("---", "---", "--:", "---")]
        lines += [_line(f"`{e.kernel}`", e.arch, str(e.spills), e.reason) for e in excuses]
        parts += ["\n".join(["## Kernels allowed to use local memory", "", *lines, ""])]
    return "\n".join(parts)


def sections(kernels: Sequence[Compiled]) -> dict[str, str]:
    """Compiler, with its version -> its table."""
    tables = {}
    for compiler in dict.fromkeys(kernel_row.compiler for kernel_row in kernels):
        rows: dict[tuple[str, str], list[Compiled]] = {}
        for kernel_row in kernels:
            if kernel_row.compiler == compiler:
                rows.setdefault((kernel_row.kernel, kernel_row.variant), []).append(kernel_row)
        lines = [_line(*TITLES), _line("---", *["--:"] * len(FACTS))]
        for kernel, variant in sorted(rows, key=lambda row: row[0]):
            title = f"`{kernel}` {variant}".strip()
            lines.append(_line(title, *(cell(rows[kernel, variant], fact) for fact in FACTS)))
        tables[compiler] = "\n".join(lines)
    return tables


def cell(row: Sequence[Compiled], fact: str) -> str:
    """Returns one fact of a row: each architecture's value, or its range."""
    values: dict[str, list] = {}
    for kernel in row:
        values.setdefault(kernel.arch, []).append(getattr(kernel.resources, fact))
    ranges = [_span(min(v), max(v)) for v in values.values()]
    return ranges[0] if len(set(ranges)) == 1 else " / ".join(ranges)


def differences(kernels: Sequence[Compiled], committed: str) -> list[str]:
    """Lines that only one of the two tables has. The tables must share a compiler."""
    parts = (part.partition("\n") for part in re.split(r"^## ", committed, flags=re.M))
    theirs = {compiler: set(text.strip().splitlines()) for compiler, _, text in parts}
    ours = {name: set(text.splitlines()) for name, text in sections(kernels).items()}
    common = [compiler for compiler in ours if compiler in theirs]
    changed_lines = [] if common else [f"the table has none of {', '.join(ours)}"]
    for compiler in common:
        mine, old = ours[compiler], theirs[compiler]
        changed_lines += [f"{compiler}: the table lacks {line}" for line in sorted(mine - old)]
        changed_lines += [f"{compiler}: the table has {line}" for line in sorted(old - mine)]
    return changed_lines


def _span(low: object, high: object) -> str:
    return _text(low) if low == high else f"{_text(low)}-{_text(high)}"


def _text(value: object) -> str:
    return (", ".join(value) or "no") if isinstance(value, tuple) else str(value)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
