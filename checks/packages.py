"""Downloads the torch packages to compile against: `python -m checks.packages FOLDER`.

With FUSEDOPS_TORCHES=FOLDER, a build compiles for all of them. Needs only pip and the standard
library: a machine that builds wheels has no torch.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# One per supported minor version.
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PARTS = (  # the files in torch's wheel that compiling and linking need
    "torch/version.py",
    "torch/include/",
    *(f"torch/lib/lib{name}.so" for name in ("c10", "torch", "torch_cpu", "torch_python")),
)


def package(version: str, folder: Path) -> Path:
    """Downloads one torch's package once, into its own folder; returns its path.

    The package has no dependencies, so a build can compile against it but not import it.
    """
    into = folder / version
    if not (into / "unpacked").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as downloads:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, "--quiet", "--dest", downloads, f"torch=={version}"], check=True)
            with zipfile.ZipFile(next(Path(downloads).glob("torch-*.whl"))) as wheel:
                wheel.extractall(into, (n for n in wheel.namelist() if n.startswith(PARTS)))
        (into / "unpacked").touch()
    return into / "torch"


def download(folder: Path) -> None:
    """Makes the folder contain exactly the versions in VERSIONS."""
    for other in folder.glob("*/torch"):
        if other.parent.name not in VERSIONS:
            shutil.rmtree(other.parent)
    for version in VERSIONS:
        package(version, folder)


if __name__ == "__main__":
    download(Path(sys.argv[1]))
