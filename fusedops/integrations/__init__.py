"""What other packages are told of this one, each in its own module, once they are imported."""

import importlib
import importlib.abc
import sys
import warnings

# A module of another package, and ours that is run as soon as that one is there.
TELLS = {"transformers.quantizers.auto": "fusedops.integrations.transformers.quantization"}


class Teller(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module of TELLS as ever, and ours after it. It imports none of them itself."""

    def find_spec(self, name, path=None, target=None):
        if name not in TELLS:
            return None
        found = None
        for finder in sys.meta_path:
            if finder is not self and (found := finder.find_spec(name, path, target)):
                break
        if found is None or found.loader is None:
            return None
        self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _tell(module.__name__)


def tell() -> None:
    """Runs what is to be run of the modules that are there, and sees to it for those to come."""
    for theirs in TELLS:
        if theirs in sys.modules:
            _tell(theirs)
    sys.meta_path.insert(0, Teller())


def _tell(theirs: str) -> None:
    try:
        importlib.import_module(TELLS[theirs])
    except ImportError as error:  # of another version, which has to work without us as well
        warnings.warn(f"fusedops: {theirs} is not told of fusedops: {error}", stacklevel=2)
