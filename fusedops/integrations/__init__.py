"""What other packages learn of this one, each in its own module, once they are imported."""

import importlib
import importlib.abc
import sys
import warnings

# A module of another package, and ours that is imported as soon as that one is there.
TELLS = {
    "torch.utils.flop_counter": "fusedops.integrations.flops",
    "transformers.quantizers.auto": "fusedops.integrations.transformers.quantization",
}


class Teller(importlib.abc.MetaPathFinder):
    """Finds the modules of TELLS where the other finders find them. It imports none itself."""

    def find_spec(self, name, path=None, target=None):
        if name not in TELLS:
            return None
        found = None
        for finder in sys.meta_path:
            if finder is not self and (found := finder.find_spec(name, path, target)):
                break
        if found is None or found.loader is None:
            return None
        found.loader = Telling(found.loader)
        return found


class Telling(importlib.abc.Loader):
    """Imports one module of TELLS by its own loader, then ours."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __getattr__(self, name):  # the source and the file, for who asks the spec alone
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _tell(module.__name__)


def tell() -> None:
    """Imports ours for the modules of TELLS that are there, and installs the finder for the others.

    In the place of an older one: two would ask each other without end.
    """
    for theirs in TELLS:
        if theirs in sys.modules:
            _tell(theirs)
    others = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]
    sys.meta_path[:] = [Teller(), *others]


def _tell(theirs: str) -> None:
    try:
        importlib.import_module(TELLS[theirs])
    except ImportError as error:  # of another version, which has to work without us as well
        warnings.warn(f"fusedops: {theirs} is not told of fusedops: {error}", stacklevel=2)
