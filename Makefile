# Two commands do everything on a fresh machine that has Python 3.11+, make and pip:
#   make demo    install into .venv and answer a prompt
#   make test    install into .venv and run every check

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# On a terminal pip shows its progress bars; elsewhere it is quiet, and the lines below say what is going on.
QUIET  := $(shell test -t 2 || echo --quiet)
PIP    := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint unit resolve-engines clean

demo: $(VENV)/.installed
	$(BIN)/sala setup
	$(BIN)/sala generate "What is the capital of France?" --temperature 0

test: lint unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto

# vLLM and SGLang pin versions of their own, so constraints.txt does not apply to them. Takes minutes.
resolve-engines: $(VENV)/.installed-dev
	$(BIN)/python -m pip --isolated install --dry-run --ignore-installed --use-feature=fast-deps --quiet '.[vllm]'
	$(BIN)/python -m pip --isolated install --dry-run --ignore-installed --use-feature=fast-deps --quiet '.[sglang]'

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing torch and about 60 packages into $(VENV): 1 GB, on Linux with CUDA libraries 3 GB"
	$(PIP) --editable '.[server]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing torch and about 100 packages into $(VENV): 1 GB, on Linux with CUDA libraries 3 GB"
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
