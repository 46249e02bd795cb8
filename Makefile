# Every goal works from nothing but make and python3: it makes .venv first where that is missing or out of date.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON      ?= python3
PIP_FLAGS   ?= -qq --disable-pip-version-check
WORKERS     ?= 2
PYTEST_ARGS ?=
ARGS        ?=

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip install $(PIP_FLAGS) -c constraints.txt

# One torch thread for each pytest worker, or the workers slow each other down.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

# created:   made anew, from an empty environment, when the pinned versions change
# installed: brought up to date in place when pyproject.toml changes
CREATED   := $(VENV)/.created
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo test test-slow lint format typecheck clean

help: ## show this list
	@echo "make GOAL [PYTHON=python3.11] [WORKERS=2] [PYTEST_ARGS='-k find'] [ARGS='--steps 100']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

$(CREATED): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "gnmr-fx needs Python 3.11 or newer; '$(PYTHON)' is $$(command -v $(PYTHON) >/dev/null && $(PYTHON) --version 2>&1 || echo 'not installed')." >&2; \
	  echo "Name another one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: that Python lacks the venv module (on Debian the package python3-venv)." >&2; exit 1; }
	@$(PIP) setuptools
	@touch $@

$(INSTALLED): $(CREATED) pyproject.toml
	@echo "installing gnmr-fx and its pinned dependencies into $(VENV): takes a few minutes the first time"
	@$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

venv: $(INSTALLED) ## make .venv with the pinned versions and this package, editable

demo: $(INSTALLED) ## train a tiny Llama with gnmr-fx (ARGS=...)
	$(PY) examples/pretrain_tiny_llama.py $(ARGS)

test: $(INSTALLED) ## run the tests (WORKERS=..., PYTEST_ARGS=...)
	$(PYTEST) -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-slow: $(INSTALLED) ## run the long tests, which `make test` leaves out
	$(PYTEST) -n $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff: rules and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(INSTALLED) ## ruff: put right what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

typecheck: $(INSTALLED) ## mypy
	$(VENV)/bin/mypy

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
