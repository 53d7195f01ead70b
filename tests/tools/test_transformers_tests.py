"""`make transformers-tests`: unpacking transformers' tests, patching their models, reporting."""

import io
import tarfile

import torch
from torch import nn

from checks.transformers_tests.command import ABSENT, Run, complaints, unpack
from checks.transformers_tests.plugin import Patching
from fusedops.patching.core.swap import fused_modules


def archive(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_tests_alone_are_unpacked(tmp_path):
    files = {"transformers-5/tests/test_common.py": b"x = 1\n", "transformers-5/setup.py": b""}
    files["transformers-5/src/tests/test_other.py"] = b""
    present, absent = ABSENT
    files[f"transformers-5/tests/{present}"] = b"theirs = 1\n"
    unpack(archive(tmp_path / "source.tar.gz", files), tmp_path / "suite")
    unpacked = {str(p.relative_to(tmp_path / "suite")) for p in (tmp_path / "suite").rglob("*.py")}
    assert unpacked == {"test_common.py", present, absent}
    assert (tmp_path / "suite" / present).read_text() == "theirs = 1\n"
    assert (tmp_path / "suite" / absent).read_text() == f"class {ABSENT[absent]}:\n    pass\n"


def patching_models():
    """Returns a base class whose models are patched, and what counts them."""

    class Base(nn.Module):
        pass

    patching = Patching()
    patching.install(Base)
    return Base, patching


def test_every_model_is_patched_once():
    Base, patching = patching_models()

    class Inner(Base):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

    class Outer(Base):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

    outer = Outer()
    assert outer.inner.norm in fused_modules(outer)
    outer.inner.eval()
    outer.to(torch.float32)
    assert patching.models == 1 and patching.sites == {"norm": 1}
    Inner()
    assert patching.models == 2


def outcome(of, said="", **subtests):
    return {"outcome": of, "subtests": subtests, "said": said}


def test_differences_are_reported():
    plain = Run({"a": outcome("passed"), "b": outcome("passed", passed=2), "c": outcome("failed")})
    same = Run(plain.outcomes, models=3)
    assert not list(complaints(plain, same))
    other = Run(
        {"a": outcome("failed", "wrong"), "b": outcome("passed", passed=1, skipped=1)}, models=3
    )
    assert list(complaints(plain, other)) == [
        "a: passed unpatched, failed patched: wrong",
        "b: passed (subtests: 2 passed) unpatched, "
        "passed (subtests: 1 passed, 1 skipped) patched: ",
        "c: failed unpatched, absent patched: ",
    ]


def test_a_run_that_shows_nothing_is_a_failure():
    none = Run({"a": outcome("skipped")}, models=1)
    assert list(complaints(none, none)) == ["no test passed without patch"]
    plain = Run({"a": outcome("passed")})
    assert list(complaints(plain, plain)) == ["no model was patched"]
