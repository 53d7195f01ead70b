"""Re-exports `Snapshot`, which restores what steps change."""

from fusedops.patching.core.snapshot import Snapshot

__all__ = ["Snapshot"]
