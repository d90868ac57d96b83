# `make rollout` and `make test` are the two commands to know; `make` lists the others.
#
# Each makes .venv first, with Python 3.11 or newer and nothing else of the system's. Variables:
#   PYTHON=/path/to/python3   the interpreter for .venv, instead of the first one found that is new enough
#   PIP_ARGS='...'            passed on to pip, for instance to say where it finds the CPU build of torch
#   ARGS='...'                passed on to turnstile or pytest
#   WORKERS=2                 processes that the tests are spread over; 0: this one alone

SHELL := /bin/sh
.DELETE_ON_ERROR:
.PHONY: help rollout test lint test-all test-more test-spin test-deep test-gpu bench clean

VENV := .venv
RUN := $(VENV)/bin/python
PYTHON ?=
PIP_ARGS ?=
ARGS ?=
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist worksteal
PY ?= python3

help:
	@echo "make rollout           several policies on the same small trace, on this machine's CPU"
	@echo "make test              the tests, about five minutes"
	@echo "make lint              ruff, mypy, import-linter"
	@echo "make test-all          the tests with longer searches and everything that needs more of the machine"
	@echo "make test-spin         models of the turnstile and of the split dispatch, judged by the model checker SPIN"
	@echo "make test-deep         grids of cases too long for continuous integration"
	@echo "make test-gpu PY=...   the tests that need a CUDA device, with the interpreter given, as it is"
	@echo "make bench             measurements, into bench/results"
	@echo "make clean             remove .venv, caches and builds; runs stay"

rollout: $(VENV)/ready
	$(RUN) -m turnstile compare --demo $(ARGS)

test: $(VENV)/ready
	$(RUN) -m pytest $(PARALLEL) -m "not slow and not grid and not gpu and not spin" $(ARGS)

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

test-all: test test-more test-spin

# What `make test` leaves out, and its searches again with more examples.
test-more: $(VENV)/ready
	$(RUN) -m pytest $(PARALLEL) --hypothesis-profile=deep -m "(slow or hypothesis) and not grid and not gpu and not spin" $(ARGS)

# Needs spin and a C compiler; skipped, with the reason, where they are missing.
test-spin: $(VENV)/ready
	$(RUN) -m pytest $(PARALLEL) -m "spin and not grid" $(ARGS)

test-deep: $(VENV)/ready
	$(RUN) -m pytest --hypothesis-profile=deep -m grid $(ARGS)

test-gpu:
	$(PY) -m pytest -m gpu -p no:cacheprovider $(ARGS)

bench: $(VENV)/ready
	@for file in bench/bench_*.py; do echo "$$file"; $(RUN) "$$file" || exit 1; done
	$(RUN) -m bench.page

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `ready` is written last: an installation that was interrupted starts again from nothing, a later update in place.
$(VENV)/ready: pyproject.toml constraints.txt
	@set -e; python=; \
	for each in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$each; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "no Python 3.11 or newer among $(or $(PYTHON),python3, python3.14 ... python3.11):" \
	        "install one, or name it with PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "$$python cannot make virtual environments:" \
	        "install its venv module (on Debian and Ubuntu the package python3-venv)" >&2; exit 1; \
	fi; \
	echo "Installing into $(VENV), with $$("$$python" --version), what pyproject.toml asks for. To be downloaded, unless pip"; \
	echo "has it already: about 310 MB, of which 190 MB are torch $(TORCH) as a build for CPUs (1.4 GB on disk)."; \
	echo "Where pip finds torch's build for CUDA first, as on Linux with x86-64 by default, it is several GB instead;"; \
	echo "PIP_ARGS='...' is passed on to pip, to tell it where builds for CPUs are."; \
	[ -e $@ ] || "$$python" -m venv --clear $(VENV); \
	$(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS) --editable '.[engine,test,dev]'; \
	touch $@

TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
