"""Renders docs/benchmarks.md, and a page like it for each further machine's results."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from benchmarks.figures.results import RESULTS, Result, find
from benchmarks.figures.tables import TABLES

__all__ = ["SUBJECTS", "pages"]

MAIN = "docs/benchmarks.md"
TEMPLATE = Path(__file__).with_name("benchmarks.md.jinja")
OTHER = """\
# Benchmarks: {machine}

<!-- Written by `python -m benchmarks figures`. -->

Results from another machine. [The main page](benchmarks.md) describes the benchmarks.

{sections}"""


@dataclass(frozen=True)
class Subject:
    """A section: its title, its file, its table and its command."""

    title: str
    stem: str
    table: str
    command: str


def _goals(family: str) -> Subject:
    command = f"python -m benchmarks must-show --family {family}"
    return Subject(family, f"must-show-{family.replace('_', '-')}", "goals and memory", command)


def _suite(title: str, stem: str, table: str, command: str = "") -> Subject:
    return Subject(title, stem, table, f"python -m benchmarks {command or stem}")


SUBJECTS = {
    "step": _suite("Training steps of small models", "step", "step"),
    "demo": Subject("make demo", "demo", "demo", "make demo"),
    "models": _suite("Patched models over eager ones", "models", "models"),
    "small": _suite("Models of few tokens", "small", "small"),
    "generate": _suite("generate()", "generate", "generating"),
    "mixtures": _suite("Models with mixtures of experts", "mixtures", "mixtures"),
    "sentences": _suite("A quantized sentence encoder", "sentences", "sentences"),
    "processes": _suite("Memory of processes", "process-memory", "processes"),
    "norm": _goals("norm"),
    "gated_activation": _goals("gated_activation"),
    "linear_goals": _goals("linear"),
    "linear": _suite("linear, all shapes", "linear", "shapes"),
    "few_rows": _suite("Linear layers of few rows", "few-rows", "few-rows"),
    "few_rows_no_amx": _suite(
        "The same without AMX",
        "few-rows-without-amx",
        "few-rows",
        "few-rows` with `FUSEDOPS_CPU_ISA=avx512_bf16",
    ),
    "rotary": _goals("rotary"),
    "attention": _goals("attention"),
    "cross_entropy": _goals("cross_entropy"),
    "experts": _goals("experts"),
    "quantized_linear": _goals("quantized_linear"),
    "quantizing": _suite(
        "Quantizing a weight",
        "quantize-weight",
        "quantizing",
        "quantized_linear --match quantize_weight",
    ),
    "adamw": _suite("AdamW's step", "adamw", "adamw"),
    "adamw_2": _suite("The same on 2 threads", "adamw-2-threads", "adamw", "adamw --threads 2"),
    "adamw_loss": _suite("AdamW's formats", "adamw-loss", "losses"),
    "launch": _suite("Calls on few tokens", "launch", "launch"),
}


def pages(results: Path = RESULTS) -> dict[str, str]:
    """Returns the pages that are written whole, by their path in the repository.

    Raises FigureError if a subject of the main page has no result.
    """
    files = {key: find(subject.stem, results) for key, subject in SUBJECTS.items()}
    tables = {key: section(SUBJECTS[key], matches[0]) for key, matches in files.items()}
    titles = {key: subject.title for key, subject in SUBJECTS.items()}
    further = {key: matches[1:] for key, matches in files.items()}
    machines = sorted({file.path.parent.name for matches in further.values() for file in matches})
    others = {f"docs/benchmarks_{name}.md": name for name in machines}
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    text = environment.from_string(TEMPLATE.read_text()).render(
        tables=tables,
        titles=titles,
        generated=files["generate"][0].document["model"],
        others={Path(path).name: name for path, name in others.items()},
    )
    return {MAIN: text} | {
        path: OTHER.format(machine=name, sections="\n".join(_machine_sections(further, name)))
        for path, name in others.items()
    }


def _machine_sections(files: dict[str, list[Result]], machine: str) -> Iterator[str]:
    for key, results in files.items():
        for file in results:
            if file.path.parent.name == machine:
                yield f"## {SUBJECTS[key].title}\n\n{section(SUBJECTS[key], file)}\n"


def section(subject: Subject, file: Result) -> str:
    """A result's table, with what measured it, where and when."""
    name = f"benchmarks/results/{file.name}.json"
    once = f"{file.machine}, {file.date}, commit `{file.commit}`"
    lines = [f"{once}. Command: `{subject.command}`. File: `{name}`."]
    return "\n".join([*lines, "", *TABLES[subject.table](file.document)])
