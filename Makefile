# Everything a fresh machine needs is Python 3.11 or newer with the venv module.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# More flags for the script behind a target: make train ARGS="--steps 50"
ARGS ?=

.PHONY: help .venv train test bench conformance mutants lint format clean
.DEFAULT_GOAL := help

help:
	@echo 'make train   train llama-tiny on this machine (ARGS="--steps 50" goes to the script)'
	@echo 'make test    run the tests (ARGS="-k schedule" goes to pytest)'
	@echo 'make bench   compare a streamed step with its peers (ARGS="--help" says more)'
	@echo 'make conformance  stream every kind of stage and write docs/conformance.md'
	@echo 'make mutants      break the library in 200 ways and see whether tests notice'
	@echo 'make lint    ruff and mypy; "make format" mends what can be mended'
	@echo 'make clean   remove caches and the virtual environment; runs/ stays'

train: .venv
	$(BIN)/python scripts/train.py $(ARGS)

test: .venv
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python scripts/bench.py $(ARGS)

conformance: .venv
	$(BIN)/python scripts/conformance.py $(ARGS)

mutants: .venv
	$(BIN)/python scripts/mutants.py --faults --out runs/mutants.json $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist .hypothesis .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv: $(VENV)/.installed

# A stamp, since a directory's own time says nothing about what was installed into it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python " \
	  + sys.version.split()[0] + "; expected 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV); torch is large, so the first time takes minutes'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[scripts,test]'
	@touch $@

$(VENV)/.bench $(VENV)/.lint: $(VENV)/.%: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$*]'
	@touch $@
