"""Checks that outlast a test run: `python -m checks machine-code`."""
