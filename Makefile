# `make check` and `make demo` do all of their own set-up in a fresh clone: Python >= 3.11, a C++ compiler and make suffice.

BIN := .venv/bin
SETUP := scripts/venv pyproject.toml requirements/pins.txt requirements/demo.txt $(wildcard CMakeLists.txt src/native/*)
TESTS := tests --ignore=tests/device
WORKERS := 2

.PHONY: help check lint types test format demo clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/'

check: lint types test  ## all that CI runs: linter, types, tests (sizes and import order are tests)

lint: .venv/check.stamp  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/check.stamp  ## mypy
	$(BIN)/mypy

test: .venv/check.stamp  ## the tests that need no GPU; ARGS="-k name" chooses
	$(BIN)/pytest -q -n $(WORKERS) $(TESTS) $(ARGS)

format: .venv/check.stamp  ## put the code into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: .venv/demo.stamp  ## train a network on handwritten digits through fused products
	$(BIN)/epigemm demo $(ARGS)

clean:  ## remove the environment and all that was built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/check.stamp: $(SETUP) requirements/check.txt
	scripts/venv requirements/check.txt
	@touch $@ .venv/demo.stamp

.venv/demo.stamp: $(SETUP)
	scripts/venv requirements/demo.txt
	@touch $@
