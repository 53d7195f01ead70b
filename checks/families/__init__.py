"""Checks `fusedops.patch` on a tiny model per transformers family: `python -m checks families`.

Each transformers family gets a model with random weights, from a config shrunk by its attributes'
names. The check runs it, patches it with all of patch's defaults, runs it again, and unpatches it.
Outputs, loss, the logits of generated tokens and all gradients must meet `patch(verify=...)`'s
criterion; after unpatch, all bits, classes and names must be as before.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from checks.families import sweep, table
from checks.families.families import KINDS
from checks.families.judge import Row
from checks.families.planned import judge_memory

__all__ = ["KINDS", "SECONDS", "run"]

SECONDS = 120.0


def run(
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
    json: str | Path | None = None,
    markdown: str | Path | None = None,
    seconds: float = SECONDS,
    again: bool = False,
    memory: bool = False,
) -> bool:
    """Checks the families, prints each result, and writes the tables. True if none is wrong.

    names: families, all by default. kinds: of `families.KINDS`, all by default. json: a file for
    all rows; families already in it are skipped, unless `again`. markdown: a file for the table.
    seconds: time limit per family, after which its process is killed. Raises ValueError for an
    unknown family, and ModuleNotFoundError if transformers is not installed.

    memory: check `fusedops.memory` instead, whose rows need another file and have no table.
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("families needs transformers: pip install 'fusedops[hf]'")
    pairs = sweep.wanted(names, kinds)
    file = None if json is None else Path(json)
    judge = judge_memory if memory else sweep.judge_patch
    rows = sweep.sweep(pairs, file, seconds, again, _tell, judge)
    if markdown is not None:
        Path(markdown).write_text(table.markdown(list(rows.values()), sweep.versions()))
    mine = [row for row in rows.values() if (row["kind"], row["family"]) in set(pairs)]
    print(table.verdicts(mine) if memory else table.summary(mine))
    return table.all_right(mine)


def _tell(row: Row, done: int, of: int) -> None:
    print(f"{done:4} of {of}  {table.line(row)}", flush=True)
