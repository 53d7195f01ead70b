"""checks/install_blocks.py runs the documented install commands, changing only package sources."""

import argparse
import subprocess
from pathlib import Path

import pytest

from checks import install_blocks
from checks.install_blocks import HERE, PAGES, ROOT, TORCH_INDEX

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}


def blocks(page):
    return install_blocks.install_blocks(TEXTS[page])


def test_pages_have_blocks_from_source_and_from_the_wheel():
    kinds = [HERE in line for page in PAGES for block in blocks(page) for line in block]
    wheels = [any("dist/*.whl" in line for line in block) for block in blocks("docs/quickstart.md")]
    assert kinds.count(True) == len(PAGES) and wheels == [False, True]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_installs_torch_first_and_ends_with_the_doctor(page):
    """The command does not count torch's download, so it must find its line."""
    for block in blocks(page):
        assert block[0].startswith("pip install torch==") and TORCH_INDEX in block[0]
        assert block[-1].startswith("fusedops doctor")
        assert any("fusedops build" in line for line in block) == any(HERE in x for x in block)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_other_way_to_install_that_is_not_run(page):
    shown = sum(line.startswith("pip install") for line in TEXTS[page].splitlines())
    assert shown == sum(x.startswith("pip install") for block in blocks(page) for x in block)


@pytest.fixture
def dist(tmp_path):
    (tmp_path / "fusedops-1.2.3.tar.gz").touch()
    (tmp_path / "fusedops-docs.tar.gz").touch()
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_only_sources_are_replaced(page, dist):
    for line in (line for block in blocks(page) for line in block):
        changed = install_blocks.from_dist(line, dist, pypi=True)
        back = changed.replace(f'"{dist}/fusedops-1.2.3.tar.gz[hf]"', HERE)
        assert back == line.replace(TORCH_INDEX, "")
        assert HERE not in changed and "download.pytorch.org" not in changed
        assert install_blocks.from_dist(line, dist, pypi=False).count(TORCH_INDEX) == line.count(
            TORCH_INDEX
        )


def test_two_packages_or_none_are_an_error(dist):
    (dist / "fusedops-1.2.2.tar.gz").touch()
    with pytest.raises(SystemExit, match=r"must have one .* not 2: run `make release`"):
        install_blocks.from_dist(f"pip install {HERE}", dist, pypi=False)
    with pytest.raises(SystemExit, match="not 0"):
        install_blocks.only(dist, "*.whl")


def newcomer(folder, monkeypatch):
    def bare(venv, with_pip):
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to("/bin/sh")

    monkeypatch.setattr(install_blocks.venv, "create", bare)
    return install_blocks.Newcomer(folder)


def test_a_newcomer_has_an_empty_home_and_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PIP_CERT", "/a.crt")
    environment = newcomer(tmp_path, monkeypatch).environment
    assert not [*Path(environment["HOME"]).iterdir()]
    assert "PYTHONPATH" not in environment and environment["PIP_CERT"] == "/a.crt"
    assert environment["PATH"].split(":")[0] == str(tmp_path / "venv" / "bin")


def test_a_line_that_fails_ends_the_check_with_its_output(tmp_path, monkeypatch):
    user = newcomer(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match=r"(?s)echo why; exit 3.*status 3:.*why"):
        user.line("echo why; exit 3")
    with pytest.raises(SystemExit, match="left fusedops without kernels"):
        user.line("echo fusedops is installed without its compiled part")


def test_a_program_must_print_a_report(tmp_path, monkeypatch):
    user = newcomer(tmp_path, monkeypatch)  # its Python is a shell
    with pytest.raises(SystemExit, match="printed no report"):
        user.program("echo nothing")


def test_a_slow_installation_fails(monkeypatch, capsys):
    for kind, limit in install_blocks.LIMITS.items():
        for seconds, status in ((limit + 1, 1), (limit - 1, 0)):
            monkeypatch.setattr(install_blocks, "tried", lambda *_, t=(kind, seconds): t)
            asked = argparse.Namespace(page=["README.md"], pypi=False)
            assert install_blocks.run(asked) == status
    assert "longer than its limit" in capsys.readouterr().err


def test_make_release_check_takes_torch_where_make_does():
    def command(*variables):
        make = ["make", "-n", "-o", ".venv/.demo", "release-check", *variables]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True).stdout

    assert "checks install-blocks" in command()
    assert "--pypi" in command("TORCH_INDEX=") and "--pypi" not in command()
