# Two commands do everything on a fresh machine that has Python 3.11+, make and pip:
#   make demo    install into .venv and answer a prompt
#   make test    install into .venv and run every check

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := build/random-tiny
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint unit clean

demo: $(VENV)/.installed $(MODEL)
	@echo "No trained model is included yet: this one has random weights, so it babbles."
	$(BIN)/sala generate -m $(MODEL) "What is in this document?" -f README.md -n 80

test: lint unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto

$(MODEL): | $(VENV)/.installed
	$(BIN)/sala init $(MODEL)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
