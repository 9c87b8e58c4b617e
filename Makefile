# Two commands for a fresh machine with Python >= 3.10:
#   make train                          virtual environment, dependencies, native build, then MOSE on `digits`
#   make train STREAM=split-cifar100 ARGS="--data-dir DIR --memory 1000"
#   make test                           the same environment, then the tests: five minutes on two cores
#   make test-all                       the slow tests too: half an hour on two cores
#   make release                        checks, source distribution and tag of a version (docs/releasing.md)
#   make paper-trial                    every table and figure of the paper with a small network (for the night)
#   make docs                           these pages and the Python reference as a site with search, in build/site
#   make mutants                        small changes to methods and losses by mutmut: prints what no test notices
#   make nightly                        make mutants; kernels' budgets for every GPU of a release; nvcc's PTX on the CPU
#                                       with more cases, and with faults
# Also: make lint, make clean. A second call repeats only the steps whose inputs have changed.

STREAM ?= digits
OUT ?= runs/$(STREAM)
ARGS ?=
# A small network is enough for the built-in digits: minutes on two cores.
ifeq ($(STREAM),digits)
STREAM_ARGS = --width 16 --memory 500
endif

# Compile only for the GPUs of this machine, or for Hopper if there is none. The list of a release takes several times
# as long.
ifndef TORCH_CUDA_ARCH_LIST
TORCH_CUDA_ARCH_LIST := $(shell { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
  | grep -E '^[0-9]+\.[0-9]$$' || echo 9.0; } | sort -u | paste -sd ';')
endif
export TORCH_CUDA_ARCH_LIST

VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# Prints what a step does and, every ten seconds, how long it has taken. Shows the step's own output only if it fails.
STEP := @$(VENV)/bin/python -m build_tools.announce
NATIVE := setup.py pyproject.toml $(wildcard build_tools/*.py) $(shell find csrc -type f)

.PHONY: train test test-all docs release paper-trial mutants nightly lint clean
.DELETE_ON_ERROR:

train: $(VENV)/package.stamp
	$(VENV)/bin/mose-fast run --stream $(STREAM) $(STREAM_ARGS) --seed 0 --out $(OUT) --overwrite $(ARGS)

# One worker for each core, with one thread each: two workers with two threads each are ten times slower on two cores.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)

# Tests start Python a hundred times: what it compiles is kept, even where the environment says otherwise.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
  --no-loadscope-reorder --durations 10

test: $(VENV)/test.stamp
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/test.stamp
	$(PYTEST) $(PYTEST_ARGS)

# A warning is an error: a link that leads nowhere, a page that no page lists, a docstring that cannot be read.
docs: $(VENV)/docs.stamp
	rm -rf build/site
	$(VENV)/bin/python -m sphinx -EWq --keep-going -c docs/site -d build/doctrees . build/site
	@echo "the site: build/site/index.html"

# All runs behind the paper's tables, at width 8 with 20 images a task, and paper-trial.html. Rotating a digit changes
# its label.
#   make paper-trial PAPER_STREAM="--data-dir DIR"   on the paper's data sets; their test images take most of the time
PAPER_STREAM ?= --stream digits --set rotations=1
paper-trial: $(VENV)/package.stamp
	$(VENV)/bin/mose-fast paper all $(PAPER_STREAM) --width 8 --limit-per-task 20 --device cpu --seeds 0 \
	  --out runs/paper-trial $(ARGS)

# One mutant a second; about 3,500. MUTANTS="mose_fast.methods.er.*" chooses some; to see one: .venv/bin/mutmut show
# NAME
MUTANTS ?=
mutants: $(VENV)/mutants.stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/mutmut run --max-children $(WORKERS) $(MUTANTS)
	@echo "no test noticed these (mutmut show NAME):"
	@$(VENV)/bin/mutmut results | grep -E ': (survived|no tests|timeout)' || echo "none"

# The interpreter is no part of this repository: it lies beside it, in shared/tools. Wants nvcc and g++; no GPU.
PTX_ON_CPU := ../shared/tools/ptx_on_cpu/run.py
nightly: mutants
	$(VENV)/bin/python -m build_tools.kernel_budget
	$(VENV)/bin/python $(PTX_ON_CPU) .
	$(VENV)/bin/python $(PTX_ON_CPU) . --faults

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' mose_fast/_version.py)

# Builds in dist/ and build/release, and tags. Nothing leaves this machine.
release: $(VENV)/test.stamp
	@test -z "$$(git status --porcelain)" || { echo "there are changes that are not committed" >&2; exit 1; }
	@grep -q "^## $(VERSION) (20[0-9-]*)$$" CHANGELOG.md || \
	  { echo "CHANGELOG.md has no '## $(VERSION) (DATE)'" >&2; exit 1; }
	@! git rev-parse -q --verify "v$(VERSION)" >/dev/null || { echo "there is a tag v$(VERSION) already" >&2; exit 1; }
	rm -rf dist build/release
	$(VENV)/bin/python setup.py -q sdist
	$(PIP) --no-build-isolation --no-deps --target build/release dist/*.tar.gz
	cd build/release && MOSE_FAST_SELF_CHECK=0 ../../$(VENV)/bin/python -W error::RuntimeWarning \
	  -m mose_fast run --width 1 \
	  --memory 64 --limit-per-task 10 --device cpu --out run
	git tag -a "v$(VERSION)" -m "mose-fast $(VERSION)" && ls dist

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files csrc tests/kernels | grep -E '\.(h|cpp|cu|cuh)$$')

clean:
	rm -rf $(VENV) build mutants *.egg-info mose_fast/_C.*.so mose_fast/_build.json

$(VENV)/bin/python:
	@python=$(PYTHON); \
	for candidate in python3 python3.13 python3.12 python3.11 python3.10; do \
	  if [ -z "$$python" ] && \
	    $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    python=$$candidate; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "no Python >= 3.10 with venv on PATH; install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "creating a virtual environment with $$python in $(VENV) ..." >&2; \
	$$python -m venv $(VENV)

# torch is installed before the package, because the native library is compiled against it.
$(VENV)/torch.stamp: | $(VENV)/bin/python
	$(STEP) "installing torch, torchvision and ninja" "several GB with CUDA; 1 to 10 minutes" -- \
	  $(PIP) --upgrade "torch>=2.11" torchvision "setuptools>=77" ninja
	@touch $@

$(VENV)/package.stamp: $(VENV)/torch.stamp $(NATIVE)
	$(STEP) "compiling the native library and installing mose-fast" --native -- $(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/package.stamp
	$(STEP) "installing what the tests need" "about 1 GB; 1 to 5 minutes" -- $(PIP) --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/docs.stamp: $(VENV)/package.stamp
	$(STEP) "installing Sphinx" -- $(PIP) --no-build-isolation -e ".[docs]"
	@touch $@

$(VENV)/mutants.stamp: $(VENV)/test.stamp
	$(STEP) "installing mutmut" -- $(PIP) --no-build-isolation -e ".[mutants]"
	@touch $@
