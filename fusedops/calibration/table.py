"""Reads and writes the tables of timed calls, and chooses this CPU's.

`fusedops calibrate` writes a table for this machine. It is used instead of the package's tables.
"""

import functools
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fusedops.backends import cpu_name
from fusedops.cache import caches, replace, version
from fusedops.extension import _C, UNCOMPILED

__all__ = ["CPUKind", "Choice", "Table", "TimedCall", "chosen", "cpu_kind", "is_off", "user_path"]

VARIABLE = "FUSEDOPS_CALIBRATE"
SHIPPED = Path(__file__).parent / "tables"
ISAS = ("avx2", "avx512", "avx512_bf16", "amx")
START = 4096  # bytes of /proc/cpuinfo: the first CPU. A whole file takes long on large machines.


class TimedCall(NamedTuple):
    """A call that was timed both ways. ratio: our kernel's seconds over torch's."""

    sizes: tuple[int, ...]
    ratio: float


class CPUKind(NamedTuple):
    """What decides how fast kernels are: vendor, instruction set, and the vendor's CPU family."""

    vendor: str
    isa: str
    family: int

    def __str__(self) -> str:
        return f"{self.vendor}-{self.isa}-family-{self.family}"

    @classmethod
    def parse(cls, text: str) -> "CPUKind":
        """The kind that `str` wrote. Raises ValueError for another text."""
        match = re.fullmatch(rf"(\w+)-({'|'.join(ISAS)})-family-(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no kind of CPU")
        return cls(match[1], match[2], int(match[3]))


@dataclass
class Table:
    """Timed calls by kind of call. about: the machine, versions and date."""

    about: dict[str, Any]
    calls: dict[str, list[TimedCall]] = field(default_factory=dict)

    def families(self) -> list[str]:
        return sorted({family_of(kind) for kind in self.calls})

    def calls_of(self, family: str) -> list[TimedCall]:
        kinds = (kind for kind in self.calls if family_of(kind) == family)
        return [call for kind in kinds for call in self.calls[kind]]

    def merged(self, newer: "Table") -> "Table":
        """This table with all families that the newer one has replaced."""
        replaced = newer.families()
        kept = {k: calls for k, calls in self.calls.items() if family_of(k) not in replaced}
        return Table(newer.about, kept | newer.calls)

    def write(self, path: Path) -> None:
        """Writes the table, one line for each kind of call. Raises OSError if it cannot."""
        lines = [f'"about": {json.dumps(self.about)}']
        for kind, calls in sorted(self.calls.items()):
            rows = [[*call.sizes, round(call.ratio, 3)] for call in calls]
            lines.append(f"{json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), 0o644)

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Raises OSError if the file cannot be read, and ValueError if it is no table."""
        try:
            content = json.loads(path.read_text())
            about = dict(content.pop("about"))
            calls = {kind: [_timed_call(row) for row in rows] for kind, rows in content.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it is no table of timed calls: {error!r}") from error
        for kind, timed in calls.items():
            if len({len(call.sizes) for call in timed}) != 1:
                raise ValueError(f"its calls of {kind!r} do not have equally many sizes")
        return cls(about, calls)


def family_of(kind: str) -> str:
    return kind.partition(" ")[0]


def _timed_call(row: list[Any]) -> TimedCall:
    *sizes, ratio = row
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"the sizes of a call must be positive integers, got {sizes}")
    if type(ratio) not in (int, float) or not (0 < ratio < math.inf):
        raise ValueError(f"a ratio must be a positive number, got {ratio!r}")
    return TimedCall(tuple(sizes), ratio)


@functools.cache
def cpu_kind() -> CPUKind:
    """This process's CPU."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            text = file.read(START)
    except OSError:
        text = ""
    isa = _C.cpu_isa()
    if isa == ISAS[-2] and _C.has_amx():
        isa = ISAS[-1]
    vendor = re.search(r"^vendor_id\s*: (?:Genuine|Authentic)?(\w+)", text, re.M)
    family = re.search(r"^cpu family\s*: (\d+)", text, re.M)
    return CPUKind(vendor[1].lower() if vendor else "other", isa, int(family[1]) if family else 0)


def user_path() -> Path:
    """The file that `calibrate` writes. Raises RuntimeError if there is no cache folder."""
    name = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return caches(os.environ) / "calibration" / f"{name}-{cpu_kind()}.json"


class Choice(NamedTuple):
    """The table that this process uses, its file, and why the user's own is not used, if so."""

    table: Table
    path: Path
    refused: str


def is_off() -> bool:
    """Whether FUSEDOPS_CALIBRATE is "off". Raises ValueError if it has another value."""
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "off"):
        raise ValueError(f"{VARIABLE} must be 'off' or empty, got {setting!r}")
    return bool(setting)


def chosen() -> Choice | None:
    """This machine's own table, else the shipped one of the most similar CPU.

    None if there are no kernels to choose: without the compiled part, and on CPUs without AVX2.
    """
    if UNCOMPILED or cpu_kind().isa not in ISAS:
        return None
    table, path, refused = _own()
    if table is None:
        path = _most_similar()
        table = Table.read(path)
        table = _transferable(table, CPUKind.parse(path.stem))
    return Choice(table, path, refused)


def _own() -> tuple[Table | None, Path, str]:
    """The table in the cache folder, its file, and why it is refused; no reason if none exists."""
    path = Path()
    try:
        path = user_path()
        table = Table.read(path)
    except (FileNotFoundError, RuntimeError):
        return None, path, ""
    except (OSError, ValueError) as error:
        return None, path, _refusal(path, error)
    for what, here in (("fusedops", version()), ("cpu", str(cpu_kind()))):
        if (there := table.about.get(what)) != here:
            return None, path, _refusal(path, f"it was measured with {what} {there}, not {here}")
    return table, path, ""


def _refusal(path: Path, reason: object) -> str:
    return f"{path} is not used: {reason}; `fusedops calibrate` writes a new one"


def _most_similar() -> Path:
    """The shipped table of the most similar CPU. The instruction set comes first."""
    here = cpu_kind()

    def difference(path: Path) -> tuple[int, bool, int, str]:
        kind = CPUKind.parse(path.stem)
        steps = abs(ISAS.index(kind.isa) - ISAS.index(here.isa))
        return steps, kind.vendor != here.vendor, abs(kind.family - here.family), path.stem

    return min(SHIPPED.glob("*.json"), key=difference)


def _transferable(table: Table, measured_on: CPUKind) -> Table:
    """The table without the calls whose ratios say nothing about this CPU.

    torch's float32 matmuls are MKL's, whose speed depends on the vendor. Its bfloat16 matmuls are
    oneDNN's, and only some instruction sets have instructions for them.
    """
    left = set()
    if measured_on.vendor != cpu_kind().vendor:
        left |= {"linear float32 product", "linear float32 across"}
    if measured_on.isa != cpu_kind().isa:
        left.add("linear bfloat16 few")
    kinds = {k: calls for k, calls in table.calls.items() if not k.startswith(tuple(left))}
    return Table(table.about, kinds)
