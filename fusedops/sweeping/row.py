"""`SweepRow`: the measurements of one variant at one batch size and length."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from fusedops.measuring.ratios import Ratio

__all__ = ["SweepRow"]


@dataclass(frozen=True)
class SweepRow:
    """One point of a sweep. Seconds, bytes, samples per second; None where nothing was measured.

    p50, p95, p99: of a step, or in mode "generate" of a token after the first. p50_interval: 95 %.
    p95 needs 20 samples and p99 100. seconds_per_sample: the median of a step, or of a whole
    generation, over the batch. throughput: its inverse. tokens_per_s: of the batch, in mode
    "generate" of new tokens. first_token, end_to_end: medians, in mode "generate" only.

    peak_bytes: of one step, everything included. predicted_bytes: that peak as smaller points
    predicted it. ratio: how many times as fast as the first variant, paired by turns, with its
    95 % interval. samples: that were timed. noisy: other programs had the CPU in more than a tenth
    of them, also when they were repeated. skipped_reason: why nothing was measured, else empty.
    """

    variant: str
    batch: int
    length: int | None
    p50: float | None = None
    p50_interval: tuple[float, float] | None = None
    p95: float | None = None
    p99: float | None = None
    seconds_per_sample: float | None = None
    throughput: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    samples: int = 0
    noisy: bool = False
    skipped_reason: str = ""
    predicted_bytes: int | None = None
    ratio: Ratio | None = None
    first_token: float | None = None
    end_to_end: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self) | {"ratio": None if self.ratio is None else list(self.ratio)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SweepRow":
        """The row that `to_dict` made, also after a round trip through JSON."""
        row = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        for name, type_of_field in (("p50_interval", tuple), ("ratio", lambda r: Ratio(*r))):
            if row.get(name) is not None:
                row[name] = type_of_field(row[name])
        return cls(**row)
