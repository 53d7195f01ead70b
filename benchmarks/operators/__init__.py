"""Benchmark tables, one per operator family."""
