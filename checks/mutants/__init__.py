"""One-line bugs that the tests must see: `python -m checks mutants`.

csrc/cpu/norm.cpp's are in csrc/cpu/norm.cpp.toml beside this file. A table there is named after
the tests that must turn red, and has a line for each mutant: what is wrong, the text to find, which
stands in the file once, and what takes its place.
"""
