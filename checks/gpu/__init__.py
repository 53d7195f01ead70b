"""Tests and times fusedops on a GPU machine: `make gpu-once`, then `make gpu-rest`.

runner.py runs the steps of plan.py, each within its limit, and keeps one archive of all results.
`DRY=1` replaces the steps' commands with dry.py, which needs no GPU. The modules here that run
before the build import only the standard library.
"""
