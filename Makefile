# Targets that work from a clean clone; each is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install quickstart test test-published lint docs bench

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest tests

# The benchmark's other side: needs one wheel from the package registry, and says so where that has none.
test-published: $(STAMP)
	@if wheel=$$($(BIN)/python -m benchmarks.published); then \
		EBFT_AXOLOTL_WHEEL=$$wheel $(BIN)/python -m pytest tests/benchmarks -k published_trainer; \
	else echo "The published trainer was not tested."; fi

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

bench: $(STAMP)
	$(BIN)/python -m benchmarks.strided_step

docs: $(STAMP)
	$(BIN)/python docs/generate.py
