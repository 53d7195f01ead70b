"""A profile report as text, HTML and a figure, and the `fusedops profile` command."""

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from unittest import mock

import pytest

from fusedops.__main__ import main
from fusedops.measuring.units import bytes_text, seconds_text
from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.command import build
from fusedops.profiling.evidence import Run
from fusedops.profiling.report import Profile
from fusedops.profiling.shares import BOUNDS
from fusedops.profiling.show.figure import _figure
from fusedops.profiling.show.numbers import mebibytes
from fusedops.profiling.show.page import COLORS, ink
from fusedops.profiling.show.text import NAMES, shown_bounds, sizes_of
from profiling.synthetic import MS, gather, gpu_step, matmul, step, stream

REPORT = Profile(
    replace(
        step(matmul(10 * MS), stream(4 * MS), wait=30 * MS),
        memory={"parameters": 5 * 2**20, "gradients": 5 * 2**20, "peak": 12 * 2**20},
        about={"device": "<CPU & co>", "model": "Llama", "parameters": 10**7, "dtype": ["float32"]},
        not_checked=("communication: one process",),
    )
)


class Reader(HTMLParser):
    """Collects tags, links to other files, and text; refuses tags that are not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.words = [], set(), [], []

    @staticmethod
    def of(path):
        reader = Reader()
        reader.feed(path.read_text())
        return reader

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_text():
    shown = str(REPORT)
    low, middle, high = (100 * share for share in REPORT.verdict.shares["input"])
    assert f"VERDICT  input {middle:.0f} % ({low:.0f}..{high:.0f}) of the step" in shown
    assert "Llama, 10M parameters float32, 20 steps" in shown
    assert "with batches kept in memory a step takes 14" in shown
    assert re.search(r"parameters +5\.0$", shown, re.M) and "communication: one process" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_peak_comes_first_and_then_the_largest_category():
    memory = {"buffers": 3, "parameters": 5, "inputs": 0, "gradients": 4, "peak": 12, "slack": 99}
    report = Profile(replace(REPORT.evidence, memory=memory))
    names = ["peak of a step", "parameters", "gradients", "buffers"]
    assert [*sizes_of(report)] == names


def test_text_tells_what_to_do_and_where():
    """Advice says how and why, modules and the thresholds of bounds have names and numbers."""
    shown = str(REPORT)
    assert "1 bfloat16 products" in shown and "how: with torch.autocast" in shown
    assert re.search(r"\(outside of the model\) +1[34]\.\d\d +100 %", shown)
    assert re.search(r"memory bandwidth +8 % \(8\.\.8\) +40 %", shown)
    assert "peak of a step" in shown and "1 thread on 2 CPUs" in shown


def test_shares_of_a_single_recorded_step_have_no_interval():
    """Its operators were seen once; the wait for data was measured in every step."""
    live = step(matmul(10 * MS), stream(4 * MS), wait=30 * MS, cached=None)
    profiled = replace(live.profiled, seconds=live.profiled.seconds[:1])
    shown = str(Profile(replace(live, recorded=True, profiled=profiled)))
    assert re.search(r"  compute +\d+ % +50 %", shown)
    assert re.search(r"  input +\d+ % \(\d+\.\.\d+\) +10 %", shown)
    assert "shares without an interval come from one recorded step" in shown
    assert "shares without an interval" not in str(Profile(live))


def test_a_prediction_that_is_an_upper_bound_says_so():
    waits = Run((0.1,) * 8, cpu=(0.05,) * 8)
    report = Profile(replace(REPORT.evidence, plain=waits, cached=None, threads=8))
    (line,) = [line for line in str(report).splitlines() if "2 threads" in line]
    assert line.endswith(" ms at most") and not re.search("^advice.*measured", str(report), re.M)
    (line,) = [line for line in str(report).splitlines() if "bfloat16 products" in line]
    assert line.endswith(" ms")
    report._advice = [replace(report.advice[0], measured=Saving(1 * MS, None, (0.0, 2 * MS)))]
    assert re.search(r"1 .*\d ms +-1 ms \(-2\.\.-?0 ms\)", str(report))


@pytest.mark.parametrize("count, shown", [(1740, "1,740"), (99_999, "99,999"), (10**5, "0.1M")])
def test_a_small_model_has_all_digits_of_its_parameters(count, shown):
    about = REPORT.evidence.about | {"parameters": count}
    report = str(Profile(replace(REPORT.evidence, about=about)))
    assert f"Llama, {shown} parameters float32" in report


def test_changes_that_were_not_measured_for_one_reason_share_a_line():
    lines = "measuring bf16: no time", "GPU: none was used", "measuring patch: no time"
    shown = str(Profile(replace(REPORT.evidence, not_checked=(*lines, "measuring loss: raised"))))
    assert (
        "  GPU: none was used\n  measuring bf16, patch: no time\n  measuring loss: raised" in shown
    )


def test_long_lines_are_wrapped():
    path = "a/very/long/path/of/a/collate/function/" * 3
    report = Profile(replace(REPORT.evidence, not_checked=(f"{path} and some more words",)))
    report._advice = [Advice("x", "a title " * 20, "why " * 60, "how", "")]
    assert max(len(line) for line in str(report).splitlines() if path not in line) <= 100


@pytest.mark.parametrize(
    "seconds, shown",
    [(1.234, "1.23 s"), (0.99999, "1.00 s"), (0.9994, "999 ms"), (999.9e-6, "1 ms"), (0, "0 us")],
)
def test_seconds_have_no_exponent(seconds, shown):
    assert seconds_text(seconds) == shown


@pytest.mark.parametrize(
    "size, shown",
    [
        (512, "512 B"),
        (1023 * 1024, "1023 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (1500 * 2**30, "1500 GiB"),
    ],
)
def test_bytes_have_no_exponent(size, shown):
    assert bytes_text(size) == shown


def test_html_is_one_file_without_scripts(tmp_path):
    pytest.importorskip("jinja2")
    Profile(gpu_step(busy=0.2, wait=20 * MS)).html(tmp_path / "report.html")
    assert "not checked" in (tmp_path / "report.html").read_text()  # without memory and operators
    REPORT.html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and not reader.links and "script" not in reader.tags
    assert "url(" not in text and "http" not in text
    words = " ".join(reader.words)
    assert "<CPU & co>" in words and "&lt;CPU &amp; co&gt;" in text  # escaped
    assert "Limited by input" in words and "12.0" in words and "aten::mm" in words
    for bound in ("input", "compute", "memory"):
        assert NAMES[bound] in words


def test_an_unknown_verdict_names_no_next_bound(tmp_path):
    pytest.importorskip("jinja2")
    even = Profile(step(matmul(10 * MS), stream(11 * MS), gather(11 * MS)))
    assert even.verdict.bounds == ("unknown",)
    report = Profile(even.evidence, replace(even.verdict, next_bounds=("memory",)))
    report.html(tmp_path / "report.html")
    for shown in (str(report), (tmp_path / "report.html").read_text()):
        assert "the rest would be limited" not in shown
    assert "the rest would be limited by" in str(REPORT)


def test_html_can_be_read_without_seeing_it(tmp_path):
    """Language, title, one h1, levels in order, a name for the bar, header cells in every table."""
    pytest.importorskip("jinja2")
    REPORT.html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert '<html lang="en">' in text and re.search(r"<title>Limited by input, .+</title>", text)
    levels = [int(level) for level in re.findall(r"<h([1-6])>", text)]
    assert levels[0] == 1 and levels.count(1) == 1
    parts = ["Why", "Advice", "Time", "Memory", "Modules", "Operators", "Machine", "Not"]
    assert re.findall(r"<h2>([A-Z]\w+)", text) == parts
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert re.search(r'role="img" aria-label="shares of a step\'s time: input \d+ %', text)
    tables = re.findall(r"<table>.*?</table>", text, re.S)
    assert len(tables) == 4  # time, memory, modules, operators
    assert all("<caption>" in table and 'scope="col"' in table for table in tables)


def test_a_little_memory_is_not_none():
    assert [*map(mebibytes, (52_428, 52_429))] == ["<0.1", "0.1"]


def test_numbers_on_colours_can_be_read():
    """A contrast of 4.5 at least, as WCAG asks for; matplotlib converts the colours here."""
    colors = pytest.importorskip("matplotlib.colors")

    def light(color):
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in color]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True)) + 0.05

    for color in COLORS.values():
        fill, text = (light(colors.to_rgb(c)) for c in (color, ink(color)))
        assert max(fill, text) / min(fill, text) >= 4.5, color


def test_a_long_measurement_stays_apart_from_the_prediction():
    saving = Saving(seconds=275e-6, bytes=244 * 2**10, interval=(2e-4, 4.12e-4))
    report = Profile(REPORT.evidence)
    report._advice = [Advice("x", "a change", "", "", "", predicted=saving, measured=saving)]
    shown = "-275 us (-0.412..-0.2 ms), -244 KiB"
    assert re.search(rf" {re.escape(shown)} +{re.escape(shown)}$", str(report), re.M)


def test_html_has_the_advice(tmp_path):
    pytest.importorskip("jinja2")
    measured = Saving(seconds=2e-3, interval=(1e-3, 3e-3))
    report = Profile(REPORT.evidence)
    report._advice = [Advice("x", "a <change>", "it was seen", "f()", "a risk", measured=measured)]
    report.html(tmp_path / "report.html")
    words = " ".join(Reader.of(tmp_path / "report.html").words)
    for text in ("Advice", "a <change>", "it was seen", "f()", "a risk", "-2 ms (-3..-1 ms)"):
        assert text in words


@pytest.mark.parametrize(
    "ending, begins", [("svg", b"<?xm"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_plot(ending, begins, tmp_path):
    pytest.importorskip("matplotlib")
    REPORT.plot(tmp_path / f"report.{ending}")
    content = (tmp_path / f"report.{ending}").read_bytes()
    assert content[:4] == begins
    if ending == "svg":
        assert all(word in content for word in (b"Limited by input", b"peak of a step 12 MiB"))
    Profile(gpu_step(busy=0.2, wait=20 * MS)).plot(tmp_path / f"no_memory.{ending}")


def test_error_bars_of_the_figure_are_the_intervals():
    pytest.importorskip("matplotlib")
    (error_bars,) = _figure(REPORT).axes[0].collections
    shares = (REPORT.verdict.shares[bound] for bound in shown_bounds(REPORT))
    ends = [100 * end for low, _, high in shares for end in (low, high)]
    drawn = [x for segment in error_bars.get_segments() for x, _ in segment]
    assert sorted(drawn) == pytest.approx(sorted(ends))


def test_labels_of_the_figure_do_not_overlap(tmp_path):
    """Nor do they leave the figure, with every bound and long names."""
    pytest.importorskip("matplotlib")
    every = dict.fromkeys(BOUNDS, (0.05, 0.1, 0.9))
    report = Profile(REPORT.evidence, replace(REPORT.verdict, shares=every))
    figure = _figure(report)
    figure.draw_without_rendering()
    texts = [figure._suptitle, figure._supxlabel]
    for axes in figure.axes:
        texts += [*axes.texts, *axes.get_yticklabels(), axes.title, axes._left_title]
        texts += [axes.xaxis.label]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) > 2 * len(BOUNDS)
    for box_a, box_b in itertools.combinations(boxes, 2):
        assert not box_a.padded(-1).overlaps(box_b.padded(-1))
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in box.corners())


@pytest.mark.parametrize("package, show", [("jinja2", "html"), ("matplotlib", "plot")])
def test_a_missing_package_is_named(package, show, tmp_path):
    def hidden(name):
        return None if name == package else find_spec(name)

    with (
        mock.patch("importlib.util.find_spec", hidden),
        pytest.raises(ModuleNotFoundError, match=rf"needs {package}.*pip install 'fusedops\[pro"),
    ):
        getattr(REPORT, show)(tmp_path / "file")


def test_loading_another_file(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a saved report, it has no evidence"):
        Profile.load(tmp_path / "other.json")


@pytest.fixture
def command(capsys):
    """Runs `fusedops`, and gives its stdout and stderr."""

    def run(*arguments, code=0):
        assert main([*map(str, arguments)]) == code
        return capsys.readouterr()

    return run


SCRIPT = """
import sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.randn(4 * int(sys.argv[1]), 8), batch_size=4):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", sys.argv[1:], __name__)
"""


def test_a_script(command, tmp_path):
    """It may make the report's folder."""
    report = tmp_path / "runs" / "report.json"
    make_folder = f"import os\nos.mkdir({str(report.parent)!r})\n"
    (tmp_path / "train.py").write_text(make_folder + SCRIPT)
    options = ("--steps", 6, "--json", report)
    out, err = command("profile", *options, tmp_path / "train.py", 30, "--lr", 3)
    assert out == "trained ['30', '--lr', '3'] __main__\n"
    assert err.count("VERDICT") == 1
    assert Profile.load(report).time.steps == 6


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_that_exits(code, tmp_path, capsys):
    (tmp_path / "train.py").write_text(f"{SCRIPT}\nsys.exit({code})\n")
    report = tmp_path / "report.json"
    with pytest.raises(SystemExit) as raised:
        main(["profile", "--json", str(report), str(tmp_path / "train.py"), "12"])
    assert raised.value.code == code
    assert Profile.load(report).time.steps == 12 - 2
    assert capsys.readouterr().err.count("VERDICT") == 1
    (tmp_path / "train.py").write_text("raise SystemExit(4)")
    with pytest.raises(SystemExit) as raised:
        main(["profile", str(tmp_path / "train.py")])
    assert raised.value.code == 4


def test_a_script_that_does_not_train(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    _, err = command("profile", tmp_path / "train.py", 2, code=1)
    assert "must make more than 2 optimizer steps; none was recorded" in err
    _, err = command("profile", tmp_path / "none.py", code=1)
    assert "script must be a file" in err
    _, err = command("profile", code=2)
    assert "needs a script, --model NAME or --trace FILE" in err


def test_an_error_of_the_script_has_its_place(tmp_path):
    (tmp_path / "train.py").write_text("\nraise ValueError('lr')")
    with pytest.raises(ValueError, match="lr") as raised:
        main(["profile", str(tmp_path / "train.py")])
    assert raised.traceback[-1].lineno == 1


def test_a_model(command, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "vocab_size": 64, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads))
    options = ("--batch", 2, "--length", 16, "--steps", 5, "--html", tmp_path / "report.html")
    out, _ = command("profile", "--model", tmp_path / "config.json", *options)
    assert "VERDICT" in out and "LlamaForCausalLM" in out and "tokens/s" in out
    assert "LlamaForCausalLM" in (tmp_path / "report.html").read_text()
    nowhere = ("--json", tmp_path / "no" / "report.json")
    _, err = command("profile", "--model", tmp_path / "config.json", *nowhere, code=1)
    assert "profile: json must be a file in a folder that exists" in err
    _, err = command("profile", "--model", "no-such-model", code=1)
    assert "model must be a folder, a config.json, a model type of transformers" in err
    for text, message in (("{}", "a config with a model_type"), ("?", "a file of JSON")):
        (tmp_path / "config.json").write_text(text)
        _, err = command("profile", "--model", tmp_path / "config.json", code=1)
        assert err.startswith(f"fusedops profile: model must be {message}")


def test_an_empty_batch_is_refused(command):
    for size in ("batch", "length"):
        _, err = command("profile", "--model", "gpt2", f"--{size}", 0, code=1)
        assert err == f"fusedops profile: {size} must be an integer of at least 1, got 0\n"


def test_profile_and_memory_choose_the_same_model(command, tmp_path):
    pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "model_type": "bert",
    }
    heads = {"num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | heads))
    assert type(build(str(path))).__name__ == "BertForMaskedLM"
    out, _ = command("memory", path, "--batch", 1, "--length", 8)
    assert "BertForMaskedLM" in out
    path.write_text(json.dumps(sizes | heads | {"architectures": ["BertModel"]}))
    assert type(build(str(path))).__name__ == "BertForMaskedLM"  # the one that has a loss
    _, err = command("profile", "--model", path, "--length", 17, code=1)
    assert "profile: length must be at most 16, the positions that BertForMaskedLM has" in err


def test_a_model_larger_than_the_memory_is_refused(tmp_path):
    """Linux ends a process that needs too much, without a message."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 64}
    path.write_text(json.dumps(sizes | {"model_type": "bert", "num_attention_heads": 1}))
    with pytest.raises(ValueError, match=r"sweep: model must fit into the [\d.]+ GB .* got .*json"):
        build(str(path), caller="sweep", copies=10**9)
