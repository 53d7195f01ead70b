"""`Snapshot`, which restores what steps change; `patch`'s report uses it too."""

from fusedops.patching.core.snapshot import Snapshot

__all__ = ["Snapshot"]
