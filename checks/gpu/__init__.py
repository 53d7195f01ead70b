"""Builds and checks fusedops on a GPU machine: `make gpu`, whose steps are in run.sh."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
