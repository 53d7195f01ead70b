"""Texts of seconds, bytes and counts, as reports print them."""

__all__ = ["bytes_text", "count_text", "seconds_text"]


def seconds_text(seconds: float) -> str:
    """12.3 ms, 1.20 s or 45 us."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    if seconds >= 0.9995e-3:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds * 1e6)} us"


def bytes_text(size: float) -> str:
    """512 B, 3.4 KiB, 12 MiB or 1.5 GiB."""
    for unit, bound in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= bound:
            return f"{_digits(size / bound)} {unit}"
    return f"{size:.0f} B"


def _digits(value: float) -> str:
    """Three significant digits, or all of a larger number; no exponent."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def count_text(count: float, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"
