"""Performance numbers in README.md and docs/ come from benchmark results or are in allowed.toml."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

import fusedops
from benchmarks.__main__ import main
from benchmarks.figures import command, markers, plots, typed
from benchmarks.figures.registry import FIGURES, lookup
from benchmarks.figures.results import RESULTS, FigureError, find, folder_of
from benchmarks.harness import report

ROOT = Path(__file__).parents[2]
ALLOWED = ROOT / "benchmarks" / "figures" / "allowed.toml"
NOTE = "Measured: <!-- figure note --><!-- /figure -->.\n"
STEP = "step.llama.float32.fusedops"


@pytest.fixture
def tree(tmp_path):
    """A copy of the results, with a page that shows two of them and its plots."""
    shutil.copytree(RESULTS, tmp_path / "benchmarks" / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        f"Llama: <!-- figure {STEP} -->9.99x<!-- /figure -->\n\n"
        f"| a | <!-- figure {STEP} interval --><!-- /figure --> |\n\n{NOTE}"
    )
    assert command.run(root=tmp_path) == 0
    return tmp_path


def result(tree, stem="step"):
    """The file whose figures the main page shows."""
    return find(stem, tree / "benchmarks" / "results")[0].path


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_this_tree_shows_what_its_results_give():
    assert main(["figures", "--check"]) == 0


def test_every_named_figure_has_a_value():
    shown = {name: figure.text() for name, figure in FIGURES.items()}
    assert all(re.match(r"-?\d", text) for text in shown.values())


def test_markers_are_filled_from_the_result(tree):
    title = "training step of llama float32 [4, 256], default allocator"
    rows = json.loads(result(tree).read_text())["rows"]
    values = {r["contender"]: r["over_eager"] for r in rows if r["title"] == title}
    middle, low, high = (f"{value:.2f}" for value in values["fusedops"])
    text = (tree / "README.md").read_text()
    assert f"<!-- figure {STEP} -->{middle}x<!-- /figure -->" in text
    assert f"<!-- figure {STEP} interval -->{middle}x ({low}..{high})<!-- /figure -->" in text
    assert "Intel(R) Xeon(R) Processor, family 6, model 207, stepping 2, 1 thread" in text
    assert "step (2026-11-26, commit `188cfecbed7c`)" in text


def test_wrong_number_in_a_page_fails_the_check(tree, capsys):
    assert command.run(check=True, root=tree) == 0
    readme = tree / "README.md"
    readme.write_text(readme.read_text().replace(lookup(STEP).text(), "9.99x"))
    assert command.run(check=True, root=tree) == 1
    assert "README.md, near line 1, is not what" in capsys.readouterr().err
    assert command.run(root=tree) == 0 and command.run(check=True, root=tree) == 0
    benchmarks = tree / "docs" / "benchmarks.md"
    benchmarks.write_text(benchmarks.read_text().replace(lookup(STEP).text(), "9.99x"))
    assert command.run(check=True, root=tree) == 1


def test_changed_result_fails_the_check_of_page_and_plot(tree, capsys):
    def faster(document):
        for row in document["rows"]:
            row["over_eager"] = [3 * ratio for ratio in row.get("over_eager", [])]

    edit(result(tree), faster)
    assert command.run(check=True, root=tree) == 1
    said = capsys.readouterr().err
    assert "README.md" in said and "docs/benchmarks.md" in said and "step-dark.svg" in said


def test_row_that_was_not_measured_names_page_line_and_row(tree, capsys):
    def without(document):
        document["rows"] = [row for row in document["rows"] if row["contender"] != "fusedops"]

    for file in find("step", tree / "benchmarks" / "results"):
        edit(file.path, without)
    with pytest.raises(FigureError, match=rf"README.md:1: figure {STEP}: no row with .*"):
        markers.filled((tree / "README.md").read_text(), "README.md", result(tree).parents[1])
    assert command.run(check=True, root=tree) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"<!-- figure {STEP} -->1x<!-- /figure --> is fast", "must not begin with"),
        (f"- <!-- figure {STEP} -->1x<!-- /figure --> is fast", "must not begin with"),
        (f"a <!-- figure {STEP} -->1x", "expected <!-- figure NAME -->value"),
        (f"a <!-- figure {STEP} -->1x<!-- figure -->", "expected <!-- figure NAME -->value"),
        (f"a <!--figure {STEP}-->1x<!-- /figure -->", "expected <!-- figure NAME -->value"),
        (f"a <!-- figure {STEP} -->1x<!-- /figure -->", "needs <!-- figure note -->"),
        ("a <!-- figure amx.torch.1 interval --><!-- /figure -->", "has no interval"),
    ],
)
def test_malformed_marker_says_why(line, reason):
    with pytest.raises(FigureError, match=rf"x.md.*{reason}"):
        markers.filled(line, "x.md")


def test_harness_writes_cpu_and_version(tmp_path):
    path = tmp_path / "out.json"
    quick = ["--quick", "--seconds", "0.02", "--allocator", "default", "--match", "[2, 64]"]
    main(["must-show", "--family", "norm", *quick, "--worker", "--json", str(path)])
    document = json.loads(path.read_text())
    assert {row["operation"] for row in document["rows"]} == {"add_layer_norm"}
    where = document["environment"]
    assert (where["cpu"], where["fusedops"]) == (report.cpu(), fusedops.__version__)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.json")), ids=lambda path: path.stem)
def test_what_a_file_says_of_itself_is_what_the_harness_writes(path):
    document = json.loads(path.read_text())
    runs = document.get("runs", [document])
    for where in (run.get("environment", run) for run in runs):
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", where["commit"])
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", where["date"])
        folder = folder_of(where["cpu"].partition(", stepping")[0])
        assert path.parent.name == folder


# Figures that were typed by hand.


def test_no_figure_is_typed_by_hand():
    allowed = tomllib.loads(ALLOWED.read_text())
    for path, text in typed.pages(ROOT).items():
        listed = {figure for figures in allowed.pop(path, {}).values() for figure in figures}
        lines = {what: line for line, what in typed.typed(text)}
        new = {what: line for what, line in lines.items() if what not in listed}
        assert not new, f"{path}: figures without a marker, by line: {new}"
        assert listed <= set(lines), f"{path} no longer has {listed - set(lines)}: {ALLOWED.name}"
    assert not allowed, f"{ALLOWED.name} lists pages that do not exist: {list(allowed)}"


@pytest.mark.parametrize(
    "figure",
    ["1.32x", "8 ms", "3us", "2.5 µs", "28 GB/s", "35 MB", "0.05 MiB", "100 GFLOP/s", "5%"],
)
def test_typed_figure_is_found(figure):
    text = f"a page\n```\n{figure}\n```\n`{figure}` and ({figure}), [a]({figure})"
    assert list(typed.typed(text)) == [(5, " ".join(figure.split()))]


def test_table_of_numbers_without_a_unit_is_found_once():
    table = "in ms:\n\n| rows | a |\n|---|---|\n| 4 | 2.7, 3.0 |\n| 5 | 3.2 |\n\nb\n"
    assert list(typed.typed(table)) == [(5, typed.TABLE)]
    assert not list(typed.typed("| torch | 2.13.0 |\n| rows | 4 |\n| a | `2.7` |\n"))


def test_what_is_no_typed_figure():
    marker = f"a <!-- figure {STEP} interval -->1.32x (1.17..1.32)<!-- /figure -->"
    for text in (marker, "4096 x 4096", "16x16 tiles", "python3 x", "fp8 in v2.0", "<!-- 8 ms -->"):
        assert not list(typed.typed(text)), text


def test_plots_of_both_themes_have_the_figures():
    svg = {theme: plots.drawn(plots.data()["step"], theme) for theme in plots.THEMES}
    assert svg["light"] != svg["dark"]
    for text in svg.values():
        assert lookup("step.gpt2.float32.fusedops").text() in text and "torch.compile" in text
        assert plots.digest_in(text, plots.data()["step"])
