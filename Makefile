# Needs GNU make and Python 3 with venv. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

run_each = set -e; for script in $(1); do echo "== $$script"; $(BIN)/python $$script; done

.DEFAULT_GOAL := help
.PHONY: help demo test slow fuzz check format examples bench clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install -c constraints.txt -e ".[test,examples,dev]"
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

check: $(READY) ## lint, format and types, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## format, and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

examples: $(READY) ## run every example
	@$(call run_each,$(wildcard examples/[!_]*.py))

bench: $(READY) ## run every benchmark
	@$(call run_each,$(wildcard benchmarks/[!_]*.py))

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
