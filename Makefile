# `make demo` and `make test` are all that a newcomer needs; they make .venv and build into it.
# With PYTHON=/path/to/python that interpreter is used as it stands: nothing is downloaded, and
# nothing but this package is installed.
.DEFAULT_GOAL := help
.PHONY: help build demo test check format bench qemu clean

# Where pip finds a torch without CUDA; empty for PyPI alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

CPP_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
export DIST_EXTRA_CONFIG := $(CURDIR)/.ci/build.cfg

ifdef PYTHON
PY := $(PYTHON)
REQUIREMENTS :=
# Another torch is another build.
TORCH := -$(shell $(PY) -c 'import torch; print(torch.__version__)' 2>/dev/null)
else
PY := .venv/bin/python
REQUIREMENTS := .venv/.installed
endif
CLANG_FORMAT = $(PY) -c 'import clang_format; clang_format.clang_format()'
BUILT := build/.built-$(subst /,_,$(PY))$(TORCH)

help:
	@echo "make demo     train one model with fusedops and without, side by side"
	@echo "make test     all tests"
	@echo "make check    formatting, lint, types, layout"
	@echo "make bench    time the kernels against eager, Hugging Face and torch.compile"
	@echo "make build    compile and install into .venv (or PYTHON=...); the others do it too"
	@echo "make format   format Python and C++"
	@echo "make qemu     a selection of the tests on an emulated CPU without AVX-512"
	@echo "make clean    remove what was built; .venv stays"

build: $(BUILT)

demo: $(BUILT)
	$(PY) -m fusedops demo

# Two processes with a thread each, where pytest-xdist is there.
test: export OMP_NUM_THREADS ?= 1
test: $(BUILT)
	$(PY) -m pytest $(shell $(PY) -c 'import xdist; print("-n 2")' 2>/dev/null) $(ARGS)

check: $(BUILT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CPP_SOURCES)
	$(PY) -m mypy
	$(PY) -m pytest tests/test_layout.py

format: $(BUILT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP_SOURCES)

bench: $(BUILT)
	$(PY) -m benchmarks norm
	$(PY) -m benchmarks launch

# Importing torch takes half a minute there, so only what runs the kernels.
QEMU_TESTS := cpu and (forward_and_gradients or roundings or test_dropout or nan_and_inf or several)

qemu: export OMP_NUM_THREADS ?= 1
qemu: $(BUILT)
	command -v qemu-x86_64 || { [ "$$(id -u)" = 0 ] && apt-get install -y qemu-user; } || \
	  { echo 'make qemu needs qemu-x86_64: apt-get install qemu-user' >&2; exit 1; }
	qemu-x86_64 -cpu Haswell $(PY) -m pytest tests/test_norm.py -k '$(QEMU_TESTS)' $(ARGS)

clean:
	rm -rf build *.egg-info demo fusedops/_C*.so fusedops/_build_info.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks fusedops tests -name __pycache__ -exec rm -rf {} +

.venv/.installed: .ci/constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install --no-deps torch==2.13.0 \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 2 --timeout 30)
	$(PY) -m pip install -r $<
	touch $@

# The tree holds one build: that of the last interpreter.
$(BUILT): $(REQUIREMENTS) $(CPP_SOURCES) setup.py pyproject.toml
	$(PY) -m pip install --no-build-isolation --no-deps --no-index -e .
	mkdir -p build
	rm -f build/.built-*
	touch $@
