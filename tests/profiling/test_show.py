"""A report as text, HTML and a figure, and the command that makes one."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from unittest import mock

import pytest

from fusedops.__main__ import main
from fusedops.profiling.advice.advice import Advice, Saving
from fusedops.profiling.command import build
from fusedops.profiling.report import Profile
from fusedops.profiling.show.text import NAMES
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
    assert re.search(r"parameters +5 MiB", shown) and "communication: one process" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_html_is_one_file_without_scripts(tmp_path):
    pytest.importorskip("jinja2")
    REPORT.html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and not reader.links and "script" not in reader.tags
    assert "url(" not in text and "http" not in text
    words = " ".join(reader.words)
    assert "<CPU & co>" in words and "&lt;CPU &amp; co&gt;" in text  # escaped
    assert "Limited by input" in words and "12 MiB" in words and "aten::mm" in words
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


def test_html_has_the_advice(tmp_path):
    pytest.importorskip("jinja2")
    measured = Saving(seconds=2e-3, interval=(1e-3, 3e-3))
    report = Profile(REPORT.evidence)
    report._advice = [Advice("x", "a <change>", "it was seen", "f()", "a risk", measured=measured)]
    report.html(tmp_path / "report.html")
    words = " ".join(Reader.of(tmp_path / "report.html").words)
    for text in ("Advice", "a <change>", "it was seen", "f()", "a risk", "-2 ms (-3..-1 ms)"):
        assert text in words


def test_html_without_memory_and_operators(tmp_path):
    pytest.importorskip("jinja2")
    Profile(gpu_step(busy=0.2, wait=20 * MS)).html(tmp_path / "report.html")
    assert "not checked" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(ending, tmp_path):
    pytest.importorskip("matplotlib")
    REPORT.plot(tmp_path / f"report.{ending}")
    content = (tmp_path / f"report.{ending}").read_bytes()
    assert content[:4] == (b"\x89PNG" if ending == "png" else b"<?xm")
    Profile(gpu_step(busy=0.2, wait=20 * MS)).plot(tmp_path / "no_memory.svg")


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
    (tmp_path / "train.py").write_text(SCRIPT)
    report = tmp_path / "report.json"
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
    assert Profile.load(report).time.steps == 12 - 3
    assert capsys.readouterr().err.count("VERDICT") == 1


def test_a_script_that_fails_early_keeps_its_code(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(4)")
    with pytest.raises(SystemExit) as raised:
        main(["profile", str(tmp_path / "train.py")])
    assert raised.value.code == 4


def test_a_script_that_does_not_train(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    _, err = command("profile", tmp_path / "train.py", 2, code=1)
    assert "must make more than 3 optimizer steps; none was recorded" in err
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
    _, err = command("profile", "--model", "no-such-model", code=1)
    assert "model must be a folder, a config.json, a model_type or a cached name" in err


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
