"""Counts instructions, products, loads and waits in the loops of a kernel's machine code."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from checks.performance.model import LANES, Loop

CODE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
REGISTER = re.compile(r"\bR(\d+)\b((?:\.reuse)?\.64)?")
LEAST = 100  # shorter loops wait or search; they are not the ones that work
SLOW = 20  # instructions of a slow path at most, for example of a square root of a denormal
MASK = 100  # instructions of a tile's mask at least, which whole tiles skip


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
        """A branch's, -1 for other instructions."""
        found = TARGET.search(self.arguments)
        return int(found[1], 16) if self.name == "BRA" and found else -1


def parsed(text: str) -> list[Instruction]:
    return [
        Instruction(int(at, 16), bool(predicate), op, arguments)
        for at, predicate, op, arguments in CODE.findall(text)
    ]


def loops(code: Sequence[Instruction], least: int | None = None) -> list[Sequence[Instruction]]:
    """The loops of at least `least` (LEAST) instructions that contain no other, in code order.

    A jump from behind a loop into it is no loop: it repeats a wait.
    """
    index = {one.at: i for i, one in enumerate(code)}
    jumps = [(index.get(one.target, i), i) for i, one in enumerate(code)]
    spans = [(start, end) for start, end in jumps if end - start >= (least or LEAST)]
    inner = [
        (start, end)
        for start, end in spans
        if not any((start, end) != s and start <= s[0] and s[1] <= end for s in spans)
        and not any(s[0] < start <= s[1] < end for s in spans)
    ]
    return [code[start : end + 1] for start, end in sorted(inner)]


def executed(code: Sequence[Instruction], masked: bool = True) -> Iterator[Instruction]:
    """The instructions of a loop's usual path: without the slow paths, which call a subroutine.

    Any other branch is taken to fall through, so alternatives that are not slow are all counted.
    masked: whether the tile needs a mask, if whole tiles skip it.
    """
    index, i = {one.at: i for i, one in enumerate(code)}, 0
    while i < len(code):
        one = code[i]
        yield one
        to = index.get(one.target, 0)
        skipped = code[i + 1 : to]
        slow = to - i <= SLOW and any(each.name == "CALL" for each in skipped)
        skips = slow or not one.conditional or (not masked and _is_mask(skipped))
        i = to if to > i and skips else i + 1


def _is_mask(code: Sequence[Instruction]) -> bool:
    names = {one.name for one in code}
    return len(code) >= MASK and "FSEL" in names and names.isdisjoint(("HGMMA", "HMMA", "MUFU"))


def loops_of(code: Sequence[Instruction], warps: int) -> list[Loop]:
    """One iteration over a tile with a mask and, if a branch skips the mask, one without."""
    loop, whole = (loop_of(code, warps, masked) for masked in (True, False))
    return [loop] if loop == whole else [loop, whole]


def loop_of(code: Sequence[Instruction], warps: int, masked: bool = True) -> Loop:
    """One iteration, for a block of so many warps."""
    run = list(executed(code, masked))
    # Narrower loads are of a row's statistics, which its lanes share.
    loads = [one for one in run if one.name in ("LDG", "LDGSTS")]
    ahead, under = in_flight(run)
    return Loop(
        instructions=len(run) * warps,
        exponentials=sum(one.name == "MUFU" for one in run) * warps * LANES,
        wgmma=sum(_flop(one) for one in run if one.name == "HGMMA") * warps // 4,
        mma=sum(_flop(one) for one in run if one.name == "HMMA") * warps,
        waits=waits(run),
        bytes=16 * sum(".128" in one.op for one in loads) * warps * LANES + bulk_bytes(run),
        ahead=sum(_flop(one) for one in ahead) * warps // 4,
        under=len(under) * warps,
    )


def in_flight(run: Sequence[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """The products that only the next iteration waits for, and what is issued until then."""
    waits = [i for i, one in enumerate(run) if one.op == "WARPGROUP.DEPBAR.LE"]
    issued = [i for i, one in enumerate(run) if one.name == "HGMMA" and waits and i > waits[-1]]
    if not issued:
        return [], []
    until_wait = [*run[issued[0] :], *run[: waits[0]]]
    return [run[i] for i in issued], [one for one in until_wait if one.name != "HGMMA"]


def until_use(run: Sequence[Instruction], load: int) -> Iterator[Instruction]:
    """What a loop issues after the load at this index, until it reads what was loaded."""
    one = run[load]
    first, count = int(one.arguments.partition(",")[0].strip()[1:]), 4 if ".128" in one.op else 1
    loaded = {f"R{first + i}" for i in range(count)}
    for each in [*run[load + 1 :], *run[: load + 1]]:
        if not loaded.isdisjoint(_read(each)):
            return
        yield each


def _read(one: Instruction) -> Iterator[str]:
    """The registers that an instruction reads. Most write the first argument."""
    target, _, sources = one.arguments.partition(",")
    text = one.arguments if one.name in ("ST", "STG", "STS", "STL") or "[" in target else sources
    for number, pair in REGISTER.findall(text):
        yield f"R{number}"
        if pair:
            yield f"R{int(number) + 1}"


def bulk_bytes(run: Sequence[Instruction]) -> int:
    """Bytes of bulk copies, which one thread announces to their barriers."""
    constants: dict[str, int] = {}
    total = 0
    for one in run:
        register, *values = one.arguments.replace(" ", "").split(",")
        if "MOV" in one.op and values and values[-1].startswith("0x"):
            constants[register] = int(values[-1], 16)
        if one.op.startswith("SYNCS.ARRIVE.TRANS64"):
            total += constants.get(values[-1], 0)
    return total


def waits(run: Sequence[Instruction]) -> int:
    """How often an iteration waits for a whole latency.

    A load into registers is waited for before the next barrier or product. Loads into shared memory
    are waited for if some are issued after the last product, and the next iteration first waits for
    all of them. Bulk copies are waited for if no product or exponential comes after them.
    """
    marks = {"LDG": "L", "LDGSTS": "A", "BAR": "|", "HGMMA": "P", "HMMA": "P", "DEPBAR": "W"}
    marked = "".join(marks.get(one.name, "") for one in run if not _leaves_some(one))
    just_issued = re.search("^[^P]*W.*P[^P]*A[^P]*$", marked) is not None
    bulk = "".join({"UTMALDG": "B", "MUFU": "E", "HGMMA": "P"}.get(one.name, "") for one in run)
    return len(re.findall("L+", marked)) + (just_issued or bulk.endswith("B"))


def _leaves_some(one: Instruction) -> bool:
    """Whether it waits for all loads except the newest."""
    return one.name == "DEPBAR" and not one.arguments.rstrip().endswith(" 0x0")


def _flop(one: Instruction) -> int:
    """HGMMA.64x64x16 is a warpgroup's product; HMMA.16816 is a warp's, 16 x 8 x 16."""
    if one.name == "HMMA":
        return 2 * 16 * 8 * (8 if "1688" in one.op else 16)
    m, n, k = re.search(r"\.(\d+)x(\d+)x(\d+)", one.op).groups()  # type: ignore[union-attr]
    return 2 * int(m) * int(n) * int(k)
