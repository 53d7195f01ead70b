"""Writes the measured numbers, tables and plots of README and docs from benchmarks/results.

`registry.py` names the numbers ("figures") that a page can show inline, `page.py` renders
docs/benchmarks.md, `plots.py` the plots, `typed.py` finds figures that were typed by hand, and
`campaign.py` measures all CPU results again.
"""
