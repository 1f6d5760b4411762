# Each target sets up what it needs. `make setup` alone creates .venv; repeated calls are quick.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit integration kills test-adapters bench docs clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
INPUTS := requirements/cpu.txt requirements/install.sh pyproject.toml
READY := $(VENV)/.ready-$(shell cat $(INPUTS) | cksum | cut -d' ' -f1)

help:
	@echo "make setup   create .venv from requirements/cpu.txt"
	@echo "make demo    a tiny model learns arithmetic by GRPO on this machine"
	@echo "make test    linter, type checker and all tests but those of make kills"
	@echo "make test-adapters   what does not resolve beside .venv (Trackio, verifiers), tested in an environment of its own"
	@echo "make kills   real runs, killed ten times and resumed, and more ways to die than make test has (half an hour)"
	@echo "make bench   the benchmarks of docs/benchmarks.md"
	@echo "make docs    the documentation as a static site in site/"

setup: $(READY)

$(READY):
	@bash requirements/install.sh $(VENV) $(PYTHON)
	@rm -f $(VENV)/.ready-* && touch $@

demo: setup
	@$(BIN)/posttrain train experiment=arithmetic_grpo

test: lint unit integration

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

WORKERS ?= 2

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile tests --ignore=tests/integration --ignore=tests/benchmarks --ignore=tests/adapters --ignore=tests/kills

integration: setup
	$(BIN)/pytest tests/integration -m "not kills"

kills: setup
	$(BIN)/pytest tests/kills tests/integration -m kills

ADAPTERS := .venv-adapters
SITE = import sysconfig; print(sysconfig.get_path("purelib"))

test-adapters: setup
	@[ -x $(ADAPTERS)/bin/python ] || $(BIN)/python -m venv $(ADAPTERS)
	@$(ADAPTERS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/adapters.txt
	@echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(ADAPTERS)/bin/python -c '$(SITE)')/zz_posttrain.pth
	$(ADAPTERS)/bin/python -m pytest tests/adapters

bench: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/bench.txt
	@for script in tests/benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done
	@echo "== SmolLM2-135M, about half an hour"; $(BIN)/python tests/benchmarks/bench_step.py --model smollm2

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

clean:
	rm -rf $(VENV) $(ADAPTERS) site dist build
