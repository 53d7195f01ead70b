"""Scripts that tests run in their own processes."""

import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]  # the working directory in which `command` finds the script


def command(name: str, *args: Any) -> list[str]:
    """Returns the command that runs children/NAME.py: `subprocess.run(command(...), cwd=TESTS)`."""
    return [sys.executable, "-m", f"children.{name}", *map(str, args)]
