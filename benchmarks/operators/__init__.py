"""Benchmarks of operators, one module or package per operator family."""
