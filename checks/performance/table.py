"""Formats predicted and published kernel speeds as a section of docs/machine_code.md."""

from collections.abc import Iterator

from checks.machine_code import nvcc
from checks.performance import cuda_loops
from checks.performance.published import BEYOND, KERNELS, LENGTHS, Kernel
from checks.performance.rows import CUDA_ROWS, TRITON_ROWS, Row
from checks.performance.triton_loops import RUNS, Counted, compiler, counted

TITLE = "## Predicted speed"
HEAD = """{title}

`python -m checks performance --write docs/machine_code.md` writes this section, without a GPU. Its
figures are predicted or published; none is measured. A model of an H200 predicts the calls from
loops that are counted in sm_90 code of {compilers}.
[The model](design/performance_model.md) has its rules and its limits.
"""
LOOPS = """A loop's counts are for one tile and one block of threads: warps' instructions, FLOP per
loaded byte, and loads whose whole latency the block waits for.
"""
CUDA_LOOPS = """A thread's instructions in the main loops of CUDA kernels:
"""
ELSEWHERE = """The same constants predict other projects' kernels on an H100. A cell shows the
predicted and the published TFLOP/s, by sequence length.
"""
OUTSIDE = """They do not predict other projects' backwards, which keep shared memory busy.
"""


def section() -> str:
    compilers = f"{compiler()} and {nvcc.version()}"
    parts = [HEAD.format(title=TITLE, compilers=compilers), *_table(_calls())]
    parts += [LOOPS, *_table(_loops()), CUDA_LOOPS, *_table(_cuda_loops())]
    parts += [ELSEWHERE, *_table(_published(KERNELS)), OUTSIDE, *_table(_published(BEYOND))]
    return "\n".join(parts)


def placed(page: str, text: str) -> str:
    """The page with this section instead of its old one, or at its end."""
    before, _, old = page.partition(TITLE)
    _, heading, after = old.partition("\n## ")
    return f"{before.rstrip()}\n\n{text.rstrip()}\n" + (heading and f"{heading}{after}")


def _calls() -> Iterator[tuple[str, ...]]:
    yield "call", "predicted", "limit"
    yield "---", "--:", "---"
    for row in [*TRITON_ROWS, *CUDA_ROWS]:
        yield row.name, _speed(row), row.bound()


def _speed(row: Row) -> str:
    predicted = row.predicted()
    return f"{predicted:.0f} {row.unit}" if predicted >= 50 else f"{predicted:.1f} {row.unit}"


def _loops() -> Iterator[tuple[str, ...]]:
    yield "loop", "tile", "instructions", "FLOP per byte", "waits"
    yield "---", *["--:"] * 4
    for one in (one for call in RUNS for one in counted(call) if one.loops):
        for tiles, loop in (("whole tiles", one.whole), ("masked tiles", one.edge)):
            counts = f"{loop.instructions:.0f}", f"{loop.intensity:.0f}", str(loop.waits)
            yield f"{_title(one)}, {tiles}", f"{one.m} x {one.n}", *counts


def _title(one: Counted) -> str:
    return ", ".join(filter(None, (one.call, f"`{one.kernel}`", one.gradients)))


def _cuda_loops() -> Iterator[tuple[str, ...]]:
    yield "loop", "instructions"
    yield "---", "--:"
    yield "`adamw_step`, bf16, 8-bit moments", f"{cuda_loops.adamw_instructions():.0f} per element"
    for rows in cuda_loops.INT4:
        per_byte = cuda_loops.int4_instructions(rows)
        yield f"`multiply`, int4, bf16, rows of x: {rows}", f"{per_byte:.1f} per byte of codes"
    per_byte = cuda_loops.int8_instructions()
    yield "`multiply`, int8, bf16, rows of x: 1", f"{per_byte:.1f} per byte of codes"
    for rows in cuda_loops.NF4:
        per_byte = cuda_loops.nf4_instructions(rows)
        yield f"`multiply`, nf4, bf16, rows of x: {rows}", f"{per_byte:.1f} per byte of codes"


def _published(kernels: list[Kernel]) -> Iterator[tuple[str, ...]]:
    yield "kernel", *(str(length) for length in LENGTHS), "source"
    yield "---", *["--:"] * len(LENGTHS), "---"
    for kernel in kernels:
        known = dict(kernel.pairs())
        cells = (f"{kernel.predicted(n):.0f}, {known[n]}" if n in known else "" for n in LENGTHS)
        yield kernel.name, *cells, kernel.source


def _table(rows: Iterator[tuple[str, ...]]) -> list[str]:
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]
