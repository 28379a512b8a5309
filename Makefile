# Each target sets itself up on a fresh machine; Python 3.11 or newer is all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
GPU_JOBS ?= 5

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long test-gpu test-browser fuzz export-check lint docs clean
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.installed  ## create .venv with the package and what the tests need

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

demo: install  ## train on sample images with 4 labels per class, on the CPU (two to six minutes)
	$(BIN)/finessl demo

test: install  ## run the tests on the CPU; JOBS=2 is the number of processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not long"

test-long: install  ## run the slowest tests: FineSSL is ahead of supervised training on three labeled sets, lost processes, the demo, a slice of make fuzz
	$(BIN)/python -m pytest -m long tests

# Most of their time is compilation on the CPU: several processes share the GPU and one folder of compiled kernels.
test-gpu: install  ## run the tests that need a CUDA device; GPU_JOBS=5 is the number of processes. Kernels are kept in .venv
	OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=3 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor TRITON_CACHE_DIR=$(CURDIR)/$(VENV)/triton \
	  $(BIN)/python -m pytest -m gpu -vv --numprocesses $(GPU_JOBS) --dist worksteal --durations 10 tests/training tests/models tests/data tests/methods

test-browser: $(VENV)/.browser  ## run the studio's tests in Chromium: the system's, or one that Playwright fetches
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m browser tests/studio

$(VENV)/.browser: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[browser]'
	@for name in $$PLAYWRIGHT_CHROMIUM chromium chromium-browser google-chrome; do command -v $$name && exit; done; \
	  $(BIN)/python -m playwright install chromium || echo "Chromium cannot be fetched here. On Debian and Ubuntu: sudo apt-get install chromium"
	touch $@

fuzz: install  ## ten minutes of hostile input; FUZZ="--seed 1 --minutes 60 --only images" for more
	$(BIN)/python tests/fuzz --jobs $(JOBS) $(FUZZ)

export-check: install  ## export short runs and load them in virtual environments without finessl (downloads torch)
	$(BIN)/python tools/check_exports.py

lint: install  ## check code, types and the direction of imports: ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.docs  ## build the documentation as a website in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove .venv, runs, site and caches
	rm -rf $(VENV) runs .fuzz site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
