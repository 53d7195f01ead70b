"""`Sweep`: the rows of a sweep as a table, figure or JSON, and the best row."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.sweeping import choice, figure, table
from fusedops.sweeping.row import SweepRow

__all__ = ["Sweep"]


@dataclass(frozen=True)
class Sweep:
    """What `fusedops.sweep` measured. rows: by length, batch and variant. about: where and when."""

    mode: str
    rows: tuple[SweepRow, ...]
    about: dict[str, Any]

    def best(self, p95: float | None = None, goal: str = "throughput") -> SweepRow:
        """The row with the most throughput, or with the least latency, under a latency budget.

        p95: seconds that a step, or in mode "generate" a token, takes at most in 95 % of runs; rows
        with fewer than 20 samples do not count then. goal: "throughput"; "latency" for the smallest
        p50; "knee" for the most throughput among the points after which twice the batch gives less
        than 10 % more. Raises ValueError with the nearest row if no row fits.
        """
        return choice.best(self.rows, p95, goal)

    def table(self) -> str:
        """All rows in columns, for a terminal."""
        return table.text(self.mode, self.rows)

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | Path, *, p95: float | None = None) -> None:
        """Writes latency against throughput, one line a variant, in the format of path's ending.

        Knees are marked, and the budget of `p95` seconds if it is given. Raises ValueError
        without a measured row, and ModuleNotFoundError without matplotlib.
        """
        if not any(row.throughput for row in self.rows):
            raise ValueError("sweep: plot needs a row that was measured, got none")
        figure.plot(self.mode, self.rows, self.about, path, p95)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {"mode": self.mode, "about": self.about, "rows": rows}

    def save(self, path: str | Path) -> None:
        """Writes `to_dict()` as JSON, one line a row."""
        values = self.to_dict()
        rows: Sequence[dict[str, Any]] = values.pop("rows")
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head = json.dumps(values, indent=1).removesuffix("\n}")
        Path(path).write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')

    @classmethod
    def load(cls, path: str | Path) -> "Sweep":
        """Reads what `save` wrote."""
        values = json.loads(Path(path).read_text())
        rows = tuple(map(SweepRow.from_dict, values["rows"]))
        return cls(values["mode"], rows, values["about"])
