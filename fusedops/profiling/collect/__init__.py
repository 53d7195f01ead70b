"""Runs the experiments that fill an Evidence, without judging their results."""
