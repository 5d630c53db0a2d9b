# The way in, for people and for CI alike. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: errors only, not warnings about the mirror that pip is set up with
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
ARGS ?=
ONCE ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test torch lint format bench fuzz proof soak golden accuracy pin clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(VENV)/.ready  ## make the environment in .venv

# Everything that is pinned; made anew when a pin changes.
$(VENV)/.pinned: requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	"SMon needs Python 3.11 or newer, found " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	@echo "making the environment in $(VENV) (a minute)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --requirement requirements-dev.txt
	@touch $@

# SMon itself, in place.
$(VENV)/.ready: $(VENV)/.pinned pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup  ## analyse a synthetic job with a straggler (ONCE=1: once, then stop)
	@$(BIN)/smon demo $(if $(filter-out 0,$(ONCE)),--once) $(ARGS)

test: setup  ## run the tests (ARGS="-k name": options of pytest)
	@$(BIN)/pytest --numprocesses auto --dist worksteal $(ARGS)

torch: setup  ## run real training on CPUs with torch, and look at what SMon says (20 minutes)
	@.ci/torch $(ARGS)

lint: setup  ## check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup  ## format the code and fix what can be fixed safely
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## run the benchmarks and print a table
	@$(BIN)/pytest --override-ini addopts= --import-mode=importlib --benchmark-only \
	    --benchmark-columns=min,median,max,rounds --benchmark-sort=name $(ARGS) tests/benchmarks

fuzz: setup  ## read 100,000 damaged copies of the public traces (an hour)
	@PYTHONPATH=. $(BIN)/python -m tests.fuzz.readers $(ARGS)

proof: setup  ## prove what SMon holds, in full, and write docs/proof.md (hours; ARGS="scale log": some)
	@PYTHONPATH=. $(BIN)/python -m tests.proof $(ARGS)

soak: setup  ## let a server work for an hour, and see whether anything grows (not in CI)
	@PYTHONPATH=. $(BIN)/python -m tests.proof $(ARGS) soak

golden: setup  ## keep what this version stores and sends, for later ones (ARGS=--again; releases.md)
	@PYTHONPATH=. $(BIN)/python -m tests.store.released $(ARGS)
	@PYTHONPATH=. $(BIN)/python -m tests.wire.released $(ARGS)

accuracy: setup  ## measure how often the diagnosis is right, and write docs/accuracy.md (15 minutes)
	@PYTHONPATH=. $(BIN)/python -m tests.accuracy.study $(ARGS)

pin:  ## resolve the dependencies anew and write requirements*.txt
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(PYTHON) -m venv "$$dir/uv"; "$$dir/uv/bin/python" -m pip -qq install uv; \
	uv="$$dir/uv/bin/uv"; $(PYTHON) -m venv --without-pip "$$dir/env"; \
	install="$$uv pip install --quiet --python $$dir/env/bin/python"; \
	pins="$$uv pip freeze --quiet --python $$dir/env/bin/python --exclude-editable"; \
	$$install --editable '.[server]'; \
	{ echo "# What SMon runs with. Written by \`make pin\`."; \
	  $$pins | grep -v '^setuptools=='; } > requirements.txt; \
	$$install --constraint requirements.txt --editable '.[dev]'; \
	$$pins | grep -vxFf requirements.txt > "$$dir/more"; \
	{ echo "# What SMon is developed and tested with, on top. Written by \`make pin\`."; \
	  echo "-r requirements.txt"; cat "$$dir/more"; } > requirements-dev.txt

clean:  ## remove the environment, builds and caches
	@rm -rf $(VENV) build dist *.egg-info .benchmarks .hypothesis .import_linter_cache \
	    .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
