# make demo   set up, then train a GPT on two pipeline ranks        make test   set up, then run the tests
# Everything is installed into .venv; PYTHON=/path/to/python uses an environment of yours (and its torch) instead.

# On Linux on x86-64 a plain "torch" brings the CUDA packages, so the CPU build is pinned by its local version.
TORCH ?= $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),torch==2.13.0+cpu,torch==2.13.0)
RANKS ?= 2
# Where benchmarks keep their figures; OUT=bench/results replaces the repository's figures.
OUT   ?= .cache/bench
# The tests on a GPU compile about 2000 variants of kernels, each in half a second to ten seconds of one core.
# What has not begun after TEST_SECONDS is skipped.
SHARDS  ?= $(shell nproc 2>/dev/null || echo 4)
TEST_SECONDS ?= 540
GPU_TESTS = TRITON_INTERPRET=0 $(PYTHON) -m pytest -v --seconds $(TEST_SECONDS) tests/gpu
# Of tests that need no GPU: a process more than cores, for some tests wait (two cores: 185 s; with four processes 209),
# and two for a core of slow ones, of which many wait. Eight at most; 0 runs them in one, for a debugger.
# Those of one file may run in several: in test_fault_matrix.py they wait for minutes.
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 1 )))
SLOW_WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) * 2 )))
PYTEST  = -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal --hypothesis-profile ci
# `make test-torch` keeps an environment of every torch here, and runs these in it; no Triton kernels, which need the
# Triton of torch 2.10.
TORCHES ?= .cache/torch
SMOKE    = tests/test_import.py tests/test_torch_privates.py tests/ops/test_functional.py tests/ops/test_not_drawn.py \
	tests/test_gradients.py tests/test_main_grad.py \
	tests/conversion/test_conversion.py \
	tests/ops/test_autograd.py tests/wgrad/test_queue.py tests/ops/test_compile.py tests/docs/test_readme.py \
	$(addprefix tests/pipeline/,runtime/test_engine.py runtime/test_differential.py optimizer/test_optimizer.py \
	checkpoint/test_checkpoint.py) \
	tests/pipeline/test_torch_pipelining.py
PIP    = $(PYTHON) -m pip --disable-pip-version-check

export ZBKERN_BUILD ?= auto

ifeq ($(origin PYTHON),undefined)
PYTHON := .venv/bin/python
READY  := .venv/ready-$(ZBKERN_BUILD)
READY_FOR_DEMO := .venv/ready-demo
ready-gpu: $(READY)
else
override PYTHON := $(shell command -v $(PYTHON))
READY  := .cache/ready-$(ZBKERN_BUILD)-$(shell echo $(PYTHON) | cksum | cut -d' ' -f1)
READY_FOR_DEMO := $(subst ready-$(ZBKERN_BUILD),ready-demo,$(READY))
# Machines with GPUs often have no network: what has these three runs the checkout as it is, and nothing is installed.
ready-gpu:
	@$(PYTHON) -c 'import pytest, torch, triton, xdist' || $(MAKE) setup
endif

export OMP_NUM_THREADS ?= 1
# Where it is set, each of the tests' many processes compiles every file anew: a sixth of their time.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup ready-gpu cuda demo test test-all emulate install-torch test-torch test-gpu lint site bench-pipeline bench-gpu bench-split kernels-report clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /	/' | expand -t 20

setup: $(READY) ## install the package and what its tests need

.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "zbkern needs Python 3.10 or later; found " + sys.version)'
	python3 -m venv .venv

define INSTALL_TORCH
	@$(PYTHON) -c 'import torch' 2>/dev/null || $(PIP) install --quiet --no-compile '$(TORCH)' || { \
	echo "Could not install $(TORCH). Either let pip see an index that has torch's CPU builds (PIP_EXTRA_INDEX_URL),"; \
	echo "or take the default build:   make $(MAKECMDGOALS) TORCH=torch==2.13.0"; \
	echo "or use an environment with torch:   make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
endef
WHERE = $(patsubst %/bin/,%,$(dir $(PYTHON)))

$(READY): pyproject.toml $(wildcard setup.py build_tools/*.py csrc/*) | $(PYTHON)
	$(INSTALL_TORCH)
	@echo "Installing zbkern and what its tests need into $(WHERE) (ZBKERN_BUILD=$(ZBKERN_BUILD))"
	$(PIP) install --quiet --editable '.[dev,test]'
	@mkdir -p $(@D) && touch $@ $(READY_FOR_DEMO)

# The first minute of many a newcomer: torch, the package, and what torch's own engine needs, which the demo compares;
# no file is compiled that the demo does not need.
$(READY_FOR_DEMO): pyproject.toml | $(PYTHON)
	@echo "Installing torch and zbkern into $(WHERE); what tests need is installed by make test"
	$(INSTALL_TORCH)
	@ZBKERN_BUILD=off $(PIP) install --quiet --no-compile --editable . numpy
	@mkdir -p $(@D) && touch $@

cuda: ## set up with the CUDA kernels (nvcc needed, no GPU)
	$(MAKE) setup ZBKERN_BUILD=cuda

# glibc keeps what is freed: given back and taken anew, memory costs a pipeline on CPUs up to 7 % of a step
demo: export MALLOC_TRIM_THRESHOLD_ ?= 1099511627776
demo: export MALLOC_MMAP_THRESHOLD_ ?= 33554432
demo: $(READY_FOR_DEMO) ## compare schedules on this machine, then train with the best one
	$(PYTHON) -m torch.distributed.run --nproc-per-node $(RANKS) examples/train_gpt.py --steps 12 --log-every 4 --out demo

test: $(READY) ## the tests that need no GPU, without the slow ones
	$(PYTHON) $(PYTEST)

test-all: test ## and the slow ones, and properties on more examples
	-$(PIP) install --quiet trl # whose losses docs/trainer.md compares; without it that test is skipped
	$(PYTHON) $(PYTEST) --numprocesses $(SLOW_WORKERS) --slow -m "slow or more_examples" --hypothesis-profile thorough

emulate: $(READY) ## compiled kernels on an emulator: every launch, layout, dtype and seed; half an hour and more
	$(PYTHON) -m tests.emulator --jobs $(SHARDS)
	$(PYTHON) -m tests.emulator.taken_out
	$(PYTHON) -m tests.emulator.extension || test $$? = 2

install-torch: # what test-torch begins with; .ci/run downloads while other tests run
	@test -x '$(TORCHES)/$(TORCH)/bin/python' || python3 -m venv '$(TORCHES)/$(TORCH)'
	@echo "Installing $(TORCH) into $(TORCHES): from PyPI this takes several minutes and 7 GB"
	'$(TORCHES)/$(TORCH)/bin/python' -m pip --disable-pip-version-check install --quiet --upgrade --no-cache-dir \
	'$(TORCH)' pytest pytest-xdist hypothesis 'numpy<2.3'

test-torch: install-torch ## the main tests with another torch, in an environment of its own: make test-torch TORCH=torch==2.8.0
	'$(TORCHES)/$(TORCH)/bin/python' -c 'import torch; print("torch", torch.__version__)'
	'$(TORCHES)/$(TORCH)/bin/python' $(PYTEST) $(SMOKE)

test-gpu: ready-gpu ## every kernel on a GPU: against float64, on streams of its own, in CUDA graphs
	$(GPU_TESTS) -m "gpu and not alone" -n $(SHARDS); code=$$?; $(GPU_TESTS) -m "gpu and alone" && exit $$code

lint: $(READY) ## style, imports and types
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

site: $(READY) ## the pages and all docstrings as a site, in .cache/site; a link that leads nowhere is an error
	$(PIP) install --quiet --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

bench-pipeline: $(READY) ## our pipelines and torch's on two CPU processes
	$(PYTHON) -m bench.pipeline --out $(OUT)

kernels-report: $(READY) ## registers, spills and shared memory of the Triton kernels, compiled for five chips
	TRITON_INTERPRET=0 $(PYTHON) -m build_tools.kernels

bench-gpu: ready-gpu ## our kernels on a GPU beside torch's and other libraries', in about 8 minutes
	TRITON_INTERPRET=0 $(PYTHON) -m bench.gpu --out $(OUT)

bench-split: $(READY) ## what the split of backward into B and W costs
	$(PYTHON) -m bench.split --out $(OUT)
	$(PYTHON) -m bench.tensor_parallel --out $(OUT)

clean: ## remove what was built, installed and drawn
	rm -rf .venv .cache build dist demo zbkern.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
