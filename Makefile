# Needs GNU make and Python 3 with venv. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
TORCH := $(shell sed -n s/^torch==//p constraints.txt)
BENCH := .venv-bench
BENCH_READY := $(BENCH)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test slow fuzz oldest newest check format examples docs dist bench bench-quick bench-gpt zoos clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --no-compile -c $(VENV)/constraints.txt torch
	@# pip takes one core: bytecode of torch is made beside it, that of the rest on all (a few files are no Python of today)
	$(BIN)/python -m compileall -qq $(VENV)/lib/*/site-packages/torch & \
	$(BIN)/pip install --no-compile -c $(VENV)/constraints.txt -e ".[test,examples,docs,dev]"; done=$$?; wait; exit $$done
	$(BIN)/pip install --no-deps backpack-for-pytorch==1.7.1 unfoldnd==0.2.3  # asks for a torchvision it does not need
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

demo: $(READY) ## set up, then find the wrong labels among handwritten digits
	$(BIN)/python examples/quickstart.py

# One thread a worker, and in what a test starts: the workers already fill the cores.
test slow fuzz: export OMP_NUM_THREADS = 1

test: $(READY) ## set up, then the tests
	$(BIN)/pytest -n auto -m "not slow and not fuzz"

slow: $(READY) ## the tests that take long
	$(BIN)/pytest -n auto -m slow

fuzz: $(READY) ## the tests with random shapes and arguments
	$(BIN)/pytest -n auto -m fuzz

# torch's oldest and newest version that setup.cfg allows, each in an environment of its own.
oldest: ## the tests with the oldest torch
	$(MAKE) test VENV=.venv-oldest TORCH=2.10.0

newest: ## the tests with the newest torch
	$(MAKE) test VENV=.venv-newest TORCH=2.15.0

check: $(READY) ## lint, format and types, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

examples: $(READY) ## run every example
	@set -e; for script in examples/[!_]*.py; do echo "== $$script"; $(BIN)/python $$script; done

docs: $(READY) ## the documentation, into docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -E -q -b html docs docs/_build/html

dist: $(READY) ## the wheel and the source archive, into dist
	$(BIN)/python -m build

# The other libraries live in an environment of their own, as two of them ask for a torchvision that is not needed.
$(BENCH_READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install -c constraints.txt torch einops numpy scipy opt_einsum matplotlib tqdm
	$(BENCH)/bin/pip install --no-deps opacus==1.6.0 backpack-for-pytorch==1.7.1 unfoldnd==0.2.3
	-$(BENCH)/bin/pip install jax==0.10.2
	-$(BENCH)/bin/pip install --no-deps dattri-llm==0.1.0 traker==0.3.2
	$(BENCH)/bin/pip install --no-deps -e .
	@touch $@

bench: $(BENCH_READY) ## compare with other libraries, into benchmarks/results and docs/images
	$(BENCH)/bin/python -m benchmarks
	$(BENCH)/bin/python -m benchmarks --main --threads 1
	$(BENCH)/bin/python -m benchmarks.attribution > benchmarks/results/attribution.md

bench-gpt: $(READY) ## a clipped step of GPT-2 at its real size: time and memory
	$(BIN)/python -m benchmarks.gpt2

bench-quick: $(BENCH_READY) ## the six main workloads beside torch.func, printed, in a few minutes
	$(BENCH)/bin/python -m benchmarks --only cnn mlp resnet gpt lstm tiny --methods expanded_nn torch.func --no-compile --seconds 0.5

zoos: $(READY) ## one small model of each family of transformers, timm, diffusers, MONAI: are the rows right, and at what cost
	$(BIN)/python -m benchmarks.zoos

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) .venv-oldest .venv-newest $(BENCH) build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
