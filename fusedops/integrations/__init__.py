"""Registers fusedops with other packages when they are imported."""

import importlib
import importlib.abc
import sys
import warnings

from fusedops.extension import UNCOMPILED

# Another package's module -> our module that is imported right after it.
AFTER_IMPORT = {
    "peft.utils.other": "fusedops.integrations.peft",
    "torch.distributed.tensor": "fusedops.integrations.dtensor",
    "torch.utils.flop_counter": "fusedops.integrations.flops",
    "transformers.modeling_utils": "fusedops.integrations.transformers.saving",
    "transformers.quantizers.auto": "fusedops.integrations.transformers.quantization",
}
if UNCOMPILED:  # there are no operators that DTensor could dispatch
    del AFTER_IMPORT["torch.distributed.tensor"]


class ImportFinder(importlib.abc.MetaPathFinder):
    """Finds AFTER_IMPORT's modules through the other finders. It imports nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name not in AFTER_IMPORT:
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                break
        if spec is None or spec.loader is None:
            return None
        spec.loader = NotifyingLoader(spec.loader)
        return spec


class NotifyingLoader(importlib.abc.Loader):
    """Imports an AFTER_IMPORT module with its own loader, then ours."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __getattr__(self, name):  # source and path, so that inspecting the spec works
        if name == "loader":  # copy and pickle read attributes before any is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _register_with(module.__name__)


def install() -> None:
    """Registers with packages already imported, and installs the finder for the others.

    It replaces an older finder, because two finders that call each other would recurse forever.
    """
    for theirs in AFTER_IMPORT:
        if theirs in sys.modules:
            _register_with(theirs)
    others = [finder for finder in sys.meta_path if type(finder).__module__ != __name__]
    sys.meta_path[:] = [ImportFinder(), *others]


def _register_with(theirs: str) -> None:
    try:
        importlib.import_module(AFTER_IMPORT[theirs])
    except ImportError as error:  # an incompatible version must still work without fusedops
        warnings.warn(f"could not register fusedops with {theirs}: {error}", stacklevel=2)
