"""Child script: runs a module as if some packages were not installed.

For example `python tests/children/without.py numpy,triton pytest -q`.
"""

import runpy
import sys


class Others:
    """Finds what other finders find, except the hidden packages."""

    def __init__(self, hidden, finders):
        self.hidden, self.finders = hidden, finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            return None
        specs = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, *context):
        searches = (getattr(finder, "find_distributions", None) for finder in self.finders)
        for dists in (search(*context) for search in searches if search):
            yield from (dist for dist in dists if dist.name.lower() not in self.hidden)


def hide(*packages):
    assert not set(packages) & set(sys.modules)
    sys.meta_path[:] = [Others(packages, [*sys.meta_path])]


if __name__ == "__main__":
    _, names, module, *sys.argv[1:] = sys.argv
    hide(*names.split(","))
    sys.path[0] = ""  # as `python -m` has it, in place of this folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)
