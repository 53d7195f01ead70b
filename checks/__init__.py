"""Checks that take too long for a test run: `python -m checks --help`."""
