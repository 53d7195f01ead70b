"""Mutants: one-line bugs that the tests must catch (`python -m checks mutants`).

The bugs for csrc/cpu/norm.cpp are in csrc/cpu/norm.cpp.toml next to this file. Each table there is
named after the tests that must fail. Each of its lines is one mutant: what is wrong, the text to
find (once in the file), and its replacement.
"""
