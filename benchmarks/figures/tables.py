"""Tables of docs/benchmarks.md, each from one result file."""

from collections.abc import Iterable
from statistics import median

from benchmarks.figures.registry import MODELS, STEPS

__all__ = ["TABLES"]

Rows = list[dict]
ALLOCATORS = {"default": "freed memory goes back", "keep": "freed memory is kept"}


def markdown(header: list[str], lines: list[list[str]]) -> list[str]:
    """Returns a table; empty if it has no lines."""
    rows = [header, ["---"] * len(header), *lines]
    return [f"| {' | '.join(row)} |" for row in rows] if lines else []


def ratio(value: dict | list | float | None) -> str:
    """`1.32x (1.17..1.32)`; empty if it was not measured."""
    if value is None:
        return ""
    if isinstance(value, dict):
        value = [value["median"], value["low"], value["high"]]
    if isinstance(value, list):
        middle, low, high = (f"{bound:.2f}" for bound in value)
        return f"{middle}x ({low}..{high})"
    return f"{value:.2f}x"


def short(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def by(rows: Iterable[dict], *keys: str) -> dict[tuple, Rows]:
    groups: dict[tuple, Rows] = {}
    for row in rows:
        groups.setdefault(tuple(map(str, (row.get(key) for key in keys))), []).append(row)
    return groups


def of(rows: Rows, contender: str) -> dict:
    """A contender's row; empty if it has none."""
    return next((row for row in rows if row.get("contender") == contender), {})


def steps(document: dict) -> list[str]:
    """Training steps, as speedups over eager."""
    contenders = {"fusedops": "fusedops", "fusedops_adamw": "with its AdamW"}
    contenders |= {"without_attention": "attention left", "without_linear": "linears left"}
    contenders |= {"compile": "torch.compile"}
    contenders["eager, default AdamW"] = "eager, default AdamW"
    lines = []
    for model in MODELS:
        for dtype in ("float32", "bfloat16"):
            start = f"training step of {model} {dtype} [4, 256], default"
            rows = [row for row in document["rows"] if row["title"].startswith(start)]
            shown = [
                ratio(of(rows, STEPS.get(name, name)).get("over_eager")) for name in contenders
            ]
            lines.append([f"{model}, {dtype}", short(of(rows, "eager").get("median_s")), *shown])
    return markdown(["training step", "eager", *contenders.values()], lines)


def goals(document: dict) -> list[str]:
    """What was compared with what, under each setting of the allocator."""
    measured: dict[tuple[str, str], dict[str, object]] = {}
    for goal in document["goals"]:
        title, _, allocator = goal["title"].rpartition(", ")
        cells = measured.setdefault((title, goal["what"]), {})
        cells[allocator.removesuffix(" allocator")] = goal["measured"]
    settings = [name for name in ALLOCATORS if any(name in cells for cells in measured.values())]
    lines = [
        [title, what, *(_measured(cells.get(name), what) for name in settings)]
        for (title, what), cells in measured.items()
    ]
    return markdown(["measured", "compared", *(ALLOCATORS[name] for name in settings)], lines)


def _measured(value: object, what: str) -> str:
    if what == "ms" and isinstance(value, float):
        return f"{value:.1f} ms"
    return ratio(value)  # type: ignore[arg-type]


def memory(document: dict) -> list[str]:
    """Peak memory of the contenders that were weighed."""
    weighed = [row for row in document["rows"] if "peak_bytes" in row]
    lines = [
        [row["title"], row["contender"], *(f"{row[key] / 1e6:.0f} MB" for key in _BYTES)]
        for row in weighed
    ]
    return markdown(["measured", "contender", "peak", "results"], lines)


_BYTES = ("peak_bytes", "result_bytes")


def goals_and_memory(document: dict) -> list[str]:
    more = memory(document)
    return goals(document) + (["", *more] if more else [])


def host(document: dict) -> list[str]:
    """Microseconds of a call on few tokens: function, module, and torch.ops."""
    lines = []
    for (name, mode, shape), rows in by(document["rows"], "operation", "mode", "shape").items():
        eager, ours = of(rows, "eager"), of(rows, "fusedops functional")
        modules = [of(rows, f"{who} module").get("median_s") for who in ("eager", "fusedops")]
        both = modules[0] / modules[1] if all(modules) else None
        times = [short(row.get("median_s")) for row in (eager, ours)]
        speeds = [ratio(ours.get("ratio_to_eager")), ratio(both)]
        through = ratio(of(rows, "fusedops torch.ops").get("ratio_to_eager"))
        lines.append([f"`{name}` {mode} {shape}", *times, *speeds, through])
    header = ["float32", "eager", "fusedops", "over eager", "module over module", "by torch.ops"]
    return markdown(header, lines)


def models(document: dict) -> list[str]:
    """Each model's speedups, of whole sequences and of padded ones."""
    lines, columns = [], by(document["rows"], "mode", "dtype")
    for rows in by(document["rows"], "model", "padded").values():
        speeds = {(row["mode"], row["dtype"]): ratio(row["over_eager"]) for row in rows}
        title = rows[0]["model"] + ", padded" * rows[0]["padded"]
        lines.append([title, *(speeds[column] for column in columns)])
    medians = [g["measured"] for g in document["goals"] if g["title"].startswith("median of")]
    lines.append(["**median**", *(f"{middle:.2f}x" for middle in medians)])
    return markdown(["over eager", *(", ".join(column) for column in columns)], lines)


def small(document: dict) -> list[str]:
    """The range of medians over the numbers of tokens."""
    lines = []
    for what, title in (("forward", "forward"), ("training step", "step")):
        for model in MODELS:
            cells = []
            for over in ("over eager", "over torch.compile of eager"):
                start = f"{what} of {model} "
                fits = lambda g, s=start, o=over: g["title"].startswith(s) and g["what"] == o  # noqa: E731
                cells.append(span([g["measured"][0] for g in document["goals"] if fits(g)]))
            lines.append([f"{title} of {model}", *cells])
    table = markdown(["float32, 2 layers", "over eager", "both with torch.compile"], lines)
    patch = next(goal for goal in document["goals"] if goal["what"] == "ms")
    return [*table, "", f"{patch['title'].capitalize()}: {patch['measured']:.0f} ms."]


def span(values: list[float]) -> str:
    return f"{min(values):.2f}x to {max(values):.2f}x" if values else ""


def shapes(document: dict) -> list[str]:
    """The smallest, median and largest speedup of a call over its shapes."""
    lines = []
    for (name, mode, dtype), rows in by(document["rows"], "operation", "mode", "dtype").items():
        ours = [row.get("ratio_to_eager") for row in rows if row["contender"] == "fusedops"]
        ratios = [ratio["median"] for ratio in ours if ratio]
        if ratios:
            middle = f"{median(ratios):.2f}x"
            lines.append([f"`{name}` {mode}, {dtype}", str(len(ratios)), middle, span(ratios)])
    return markdown(["over eager", "shapes and settings", "median", "range"], lines)


def few_rows(document: dict) -> list[str]:
    """Speedups over eager of a weight of 4096 x 4096, by the number of rows of the input."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in document["rows"]:
        dtype, _, rest = row["title"].removeprefix("linear ").partition(" [")
        if row["contender"] != "eager" and "4096] to 4096," in rest:
            count = int(rest.partition(",")[0])
            middle = row["over_eager"][0]
            cells.setdefault((dtype, row["contender"]), {})[count] = f"{middle:.2f}x"
    every = sorted({count for counts in cells.values() for count in counts})
    lines = [[f"{d}, {c}", *(ratios.get(n, "") for n in every)] for (d, c), ratios in cells.items()]
    return markdown(["rows of the input", *map(str, every)], lines)


def quantizing(document: dict) -> list[str]:
    """Milliseconds to quantize a weight."""
    names = ("fusedops", "eager", "bitsandbytes", "copy")
    lines = [
        [name, *(short(of(rows, contender).get("median_s")) for contender in names)]
        for (name,), rows in by(document["rows"], "operation").items()
    ]
    return markdown(["float32 weight of 4096 x 4096", *names], lines)


def sentences(document: dict) -> list[str]:
    lines = [
        [
            row["contender"],
            *(f"{row[key]:.4f}" for key in ("smallest cosine", "mean cosine")),
            *(ratio(row[key]) for key in ("latency_ratio", "throughput_ratio")),
        ]
        for row in document["rows"]
        if row.get("status") == "timed"
    ]
    header = ["weights", "smallest cosine", "mean cosine", "one sentence", "batches of 32"]
    return markdown(header, lines)


def generating(document: dict) -> list[str]:
    lines = []
    for row in document["rows"]:
        cache = "StaticCache" if "StaticCache" in row["title"] else "DynamicCache"
        times = (row[f"token_{p}_s"] * 1e3 for p in ("p50", "p95", "p99"))
        tokens = " / ".join(f"{ms:.0f}" for ms in times) + " ms"
        cells = [short(row["first_token_s"]), tokens, f"{row['tokens_per_s']:.1f}"]
        ratios = [ratio(row["total_ratio"]), ratio(row["token_ratio_to_dynamic"])]
        equal = f"{row['equal_tokens']} of {row['new_tokens']}"
        lines.append([f"{cache}, {row['contender']}", *cells, *ratios, equal])
    header = ["", "first token", "each token, p50 / p95 / p99", "tokens/s", "over unpatched"]
    return markdown([*header, "each token over DynamicCache", "equal tokens"], lines)


def mixtures(document: dict) -> list[str]:
    """Patched models over three of transformers' implementations."""
    theirs = "eager", "grouped_mm", "batched_mm"
    lines = [
        [
            row["title"].rpartition(", ")[0],
            row["contender"],
            short(row["median_s"]),
            *(ratio(row.get(f"over_{base}")) for base in theirs),
        ]
        for row in document["rows"]
        if row["contender"] not in theirs
    ]
    return markdown(["", "", "time", *(f"over {base}" for base in theirs)], lines)


def adamw(document: dict) -> list[str]:
    """Ratios of medians, over whichever other contender was timed beside ours."""
    lines = []
    for (title,), rows in by(document["rows"], "title").items():
        name = title.removeprefix("AdamW step, ").removesuffix(", default allocator")
        name = name.rpartition(", ")[0]
        mine = [of(rows, f"fusedops {state}").get("median_s") for state in ("float32", "int8")]
        for row in rows:
            theirs = row.get("median_s")
            if theirs and not row["contender"].startswith("fusedops"):
                cells = ["" if s is None else ratio(theirs / s) for s in mine]
                lines.append([name, row["contender"], *cells])
    return markdown(["step", "over", "state in float32", "state in int8"], lines)


def losses(document: dict) -> list[str]:
    lines = [[r["contender"], f"{r['mean']:.4f}", f"{r['spread']:.4f}"] for r in document["rows"]]
    return markdown(["optimizer and parameters", "nats a byte", "spread of the seeds"], lines)


def demo(document: dict) -> list[str]:
    lines = [
        [name, f"{run['tokens_per_s']:.0f}", f"{run['peak_bytes'] / 2**20:.0f} MiB", f"{loss:.3f}"]
        for name, run in document["contenders"].items()
        for loss in [run["final_loss"]]
    ]
    table = markdown(["contender", "tokens/s", "peak memory", "loss at the end"], lines)
    texts = (f"{name}: {ratio(of)}" for name, of in document["fused_over"].items())
    lines = [*table, "", f"Fused in tokens/s, over {'; '.join(texts)}."]
    if (compiled := document["contenders"].get("torch.compile")) is not None:
        lines += ["", f"torch.compile compiled in {compiled['compile_s']:.0f} s."]
    return lines


def processes(document: dict) -> list[str]:
    """MiB that processes hold: how many predictions are near, and each with its measurements."""
    rows = document["rows"]
    lines = [
        [
            row["title"],
            f"{row['near']} of {row['configurations']}",
            *(f"{100 * row[key]:.1f} %" for key in ("growth_error", "resident_error")),
        ]
        for row in rows
        if "near" in row
    ]
    errors = ["configurations", "growth within 10 %", "largest error", "of resident"]
    table = markdown(errors, lines)
    header = ["model", "step", "tensors", "growth, predicted", "measured", "ratios"]
    header += ["resident, predicted", "measured", "ratios"]
    for held_out, title in ((False, "Tuned:"), (True, "Held-out:")):
        processes = [_process(row) for row in rows if row.get("held_out") == held_out]
        table += ["", title, "", *markdown(header, processes)]
    return table


OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW8bit"}


def _process(row: dict) -> list[str]:
    model, cells = row["model"], [_mebibytes(row["peak_bytes"])]
    for what in ("growth", "resident"):
        predicted, measured = row[f"predicted_{what}"], row[what]
        cells += [_mebibytes(predicted), " / ".join(map(_mebibytes, measured))]
        cells.append(" / ".join(f"{predicted / held:.2f}" for held in measured))
    size = f"{model['layers']} x {model['hidden']}, {row['parameters'] / 1e6:.0f}M"
    step = [f"{model['batch']} x {model['length']}", OPTIMIZERS[row["optimizer"]]]
    step += ["patched"] * row["patched"] + ["checkpoint"] * model["checkpoint"]
    return [f"{model['family']}, {size}, {model['dtype']}", ", ".join(step), *cells]


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f}"


TABLES = {
    "step": steps,
    "goals": goals,
    "goals and memory": goals_and_memory,
    "launch": host,
    "models": models,
    "small": small,
    "shapes": shapes,
    "few-rows": few_rows,
    "quantizing": quantizing,
    "sentences": sentences,
    "generating": generating,
    "mixtures": mixtures,
    "adamw": adamw,
    "losses": losses,
    "demo": demo,
    "processes": processes,
}
