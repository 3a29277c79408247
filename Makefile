# Two commands do everything on a fresh machine that has Python 3.11+, make and pip:
#   make demo    install into .venv and answer a prompt
#   make test    install into .venv and run every check
# And for packagers:
#   make wheel   build a wheel in dist/ that brings the C++ kernels, for machines without a compiler
#                (x86-64; with g++-aarch64-linux-gnu also ARM64, which tests run under qemu-user)
#   make sbom    write the bill of materials of this installation to dist/sala.cdx.json
#   make requirements   write examples/deploy/requirements*.txt, with hashes, for the versions of constraints.txt

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# On a terminal pip shows its progress bars; elsewhere it is quiet, and the lines below say what is going on.
QUIET  := $(shell test -t 2 || echo --quiet)
PIP    := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint unit figures resolve-engines wheel sbom requirements clean

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
	$(BIN)/python -m pytest -n auto --dist worksteal

# Every figure and table of results in the documentation, from committed results; hours if an older smol-sala measured some.
figures: $(VENV)/.installed-dev
	$(BIN)/python -m docs.figures.make_all --measure

# vLLM and SGLang pin versions of their own, so constraints.txt does not apply to them. Takes minutes.
resolve-engines: $(VENV)/.installed-dev
	$(BIN)/python -m pip --isolated install --dry-run --ignore-installed --use-feature=fast-deps --quiet '.[vllm]'
	$(BIN)/python -m pip --isolated install --dry-run --ignore-installed --use-feature=fast-deps --quiet '.[sglang]'

wheel: $(VENV)/.installed
	$(BIN)/python -c 'from sala.backends.torch.kernels.native import build_all; print(*build_all(), sep="\n")'
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

sbom: $(VENV)/.installed-dev
	$(BIN)/python examples/deploy/make_sbom.py

requirements: $(VENV)/bin/python
	$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check 'pip>=25'
	$(BIN)/python examples/deploy/make_requirements.py

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
