"""Checks that take too long for a test run; see `python -m checks --help`."""
