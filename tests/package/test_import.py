"""`import fusedops` adds few modules to torch's, warns at most once, and queries no GPU."""

import json
import subprocess
import sys

import pytest
from children import forked

ADDED = """
import json, sys, torch
before = set(sys.modules)
import fusedops
print(json.dumps(sorted(set(sys.modules) - before)))
"""

NO_DEVICE = """
import torch
def refuse(*args):
    raise RuntimeError("import fusedops asks for a device")
for name in ("is_available", "device_count", "current_device", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
import fusedops
"""

# Parts of torch that take long to load. torch loads some of them itself, depending on its version.
SLOW = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental",
    "torch.utils.flop_counter",
)


@pytest.fixture(scope="module")
def added():
    """Returns the modules that `import fusedops` loads after `import torch`."""
    return json.loads(forked("-c", ADDED, bare=True).printed().splitlines()[-1])


def test_no_other_package_is_loaded(added):
    """For example sympy, transformers, triton and numpy."""
    packages = {name.partition(".")[0] for name in added}
    assert "fusedops" in packages
    assert packages - set(sys.stdlib_module_names) <= {"fusedops", "torch"}


def test_no_slow_part_of_torch_is_loaded(added):
    assert [name for name in added if name.startswith(SLOW)] == []


def test_the_command_line_and_the_demo_are_not_loaded(added):
    assert not {"checks.families", "fusedops.demo", "fusedops.profiling"} & set(added)


def test_at_most_one_warning():
    command = [sys.executable, "-W", "always", "-c", "import torch\nimport fusedops"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert printed.count("Warning: ") <= 1, printed


def test_no_device_is_looked_for():
    """CUDA's driver would be initialised: then a process can neither fork nor hide devices."""
    forked("-c", NO_DEVICE, bare=True).printed()
