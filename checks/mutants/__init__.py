"""Mutants: one-line bugs that the tests must catch (`python -m checks mutants`).

Each family has a list next to this file; shared.toml has the files of no family. A table there is
named after a file and the tests that must fail. Each of its lines is one mutant: what is wrong, the
text to find (once in the file), and its replacement.
"""
