"""Runs transformers' own tests on patched models: `python -m checks transformers-tests`.

command.py fetches the tests and compares two runs of them. plugin.py, a pytest plugin, patches the
models and records outcomes. models.py has the model testers that the tests need. parallel.py runs
the tests of tensor parallelism and FSDP2 on two ranks.
"""
