"""Finds the loops in a kernel's machine code, and reads what an iteration executes."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

CODE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
REGISTER = re.compile(r"\bR(\d+)\b((?:\.reuse)?\.64)?")
LEAST = 100  # shorter loops wait or search; they are not the ones that work
SLOW = 20  # instructions of a slow path at most, for example of a square root of a denormal
LANES = 32


class Instruction(NamedTuple):
    at: int
    conditional: bool
    op: str  # with modifiers: "HGMMA.64x64x16.F32.BF16"
    arguments: str

    @property
    def name(self) -> str:
        return self.op.partition(".")[0]

    @property
    def target(self) -> int:
        """The address that a branch jumps to; -1 for other instructions."""
        target = TARGET.search(self.arguments)
        return int(target[1], 16) if self.name == "BRA" and target else -1


def parsed(text: str) -> list[Instruction]:
    return [
        Instruction(int(at, 16), bool(predicate), op, arguments)
        for at, predicate, op, arguments in CODE.findall(text)
    ]


def loops(code: Sequence[Instruction], least: int | None = None) -> list[Sequence[Instruction]]:
    """The loops of at least `least` (LEAST) instructions that contain no other, in code order.

    A jump from behind a loop into it is no loop: it repeats a wait.
    """
    index = {inst.at: i for i, inst in enumerate(code)}
    jumps = [(index.get(inst.target, i), i) for i, inst in enumerate(code)]
    spans = [(start, end) for start, end in jumps if end - start >= (least or LEAST)]
    inner = [
        (start, end)
        for start, end in spans
        if not any((start, end) != s and start <= s[0] and s[1] <= end for s in spans)
        and not any(s[0] < start <= s[1] < end for s in spans)
    ]
    return [code[start : end + 1] for start, end in sorted(inner)]


def executed(code: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions of a loop's usual path: without the slow paths, which call a subroutine.

    Any other branch is taken to fall through, so alternatives that are not slow are all counted.
    """
    index, i = {line.at: i for i, line in enumerate(code)}, 0
    while i < len(code):
        instruction = code[i]
        yield instruction
        to = index.get(instruction.target, 0)
        slow = to - i <= SLOW and any(each.name == "CALL" for each in code[i + 1 : to])
        i = to if to > i and (slow or not instruction.conditional) else i + 1


def intensity(run: Sequence[Instruction]) -> float:
    """FLOP per byte that an iteration loads; 0 if it loads nothing."""
    # Narrower loads read a row's statistics, which its lanes share.
    wide = [inst for inst in run if inst.name in ("LDG", "LDGSTS") and ".128" in inst.op]
    loaded = 4 * LANES * 16 * len(wide)  # by a block of four warps; their number does not matter
    products = [inst for inst in run if inst.name in ("HGMMA", "HMMA")]
    # A warpgroup of four warps issues one HGMMA, and each warp its own HMMA.
    flop = sum(_flop(inst) * (4 if inst.name == "HMMA" else 1) for inst in products)
    return flop / loaded if loaded else 0


def until_use(run: Sequence[Instruction], load: int) -> Iterator[Instruction]:
    """What a loop issues after the load at this index, until it reads the loaded value."""
    loading = run[load]
    first = int(loading.arguments.partition(",")[0].strip()[1:])
    count = 4 if ".128" in loading.op else 1
    loaded = {f"R{first + i}" for i in range(count)}
    for each in [*run[load + 1 :], *run[: load + 1]]:
        if not loaded.isdisjoint(_read(each)):
            return
        yield each


def _read(inst: Instruction) -> Iterator[str]:
    """The registers that an instruction reads. Most write the first argument."""
    target, _, sources = inst.arguments.partition(",")
    text = inst.arguments if inst.name in ("ST", "STG", "STS", "STL") or "[" in target else sources
    for number, pair in REGISTER.findall(text):
        yield f"R{number}"
        if pair:
            yield f"R{int(number) + 1}"


def _flop(inst: Instruction) -> int:
    """HGMMA.64x64x16 is a warpgroup's product; HMMA.16816 is a warp's, 16 x 8 x 16."""
    if inst.name == "HMMA":
        return 2 * 16 * 8 * (8 if "1688" in inst.op else 16)
    m, n, k = re.search(r"\.(\d+)x(\d+)x(\d+)", inst.op).groups()  # type: ignore[union-attr]
    return 2 * int(m) * int(n) * int(k)
