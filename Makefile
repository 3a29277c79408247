# Two commands do everything on a fresh machine that has Python 3.11+, make and pip:
#   make demo    install into .venv and answer a prompt
#   make test    install into .venv and run every check

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint unit clean

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

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[server]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
