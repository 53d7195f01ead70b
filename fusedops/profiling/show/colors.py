"""Colors for each possible bottleneck of a step, from palettes for colorblind readers.

Palettes: Okabe and Ito; Tol.
"""

__all__ = ["COLORS", "ink"]

COLORS = {
    "input": "#d55e00",
    "launch": "#e69f00",
    "memory": "#0072b2",
    "compute": "#56b4e9",
    "kernels": "#cc79a7",
    "allocation": "#f0e442",
    "threads": "#009e73",
    "sync": "#332288",
    "communication": "#882255",
    "unknown": "#999999",
}


def ink(color: str) -> str:
    """Black or white, whichever is easier to read on the colour (WCAG's contrast)."""
    red, green, blue = (_linear(int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#ffffff"


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
