# `make demo` and `make test` need nothing but Python >=3.11,<3.15 and git: both build .venv first.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help check install demo test test-more durations test-next test-vllm record docs lint types format clean

BIN := .venv/bin
# Two processes; each runs whole files, so that the tests of a file share their engines and servers. The order is that of
# tests/durations.py, longest first: the processes then end together.
WORKERS := 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
INSTALLED := .venv/.installed
CHECKED := tests/test_house.py tests/policies tests/cache tests/schedules \
           $(patsubst %,tests/engine/scheduler/test_%.py,admission ledger segments blocks)

# Nothing that runs from here reports usage statistics.
export VLLM_NO_USAGE_STATS := 1
# Else pytest would rewrite the assertions of all test modules anew at each run, in each process.
unexport PYTHONDONTWRITEBYTECODE

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

check: lint  ## after each edit, in less than a minute: lint, and the tests of what needs no engine, with few seeds
	$(PYTEST) -q -m "not engine and not long and not more" $(CHECKED) $(ARGS)

demo: $(INSTALLED)  ## show what eviction does, on a small model (ARGS=... are passed on)
	$(BIN)/python -m benchmarks.demo $(ARGS)

test: lint types  ## lint, types, and one proof of each kind, in twelve minutes on two cores (ARGS=... go to pytest)
	$(PYTEST) -m "not more" $(ARGS)

test-more: $(INSTALLED)  ## the same proofs over more policies, models, versions and faults: what `make test` leaves out
	$(PYTEST) -m more $(ARGS)

durations: $(INSTALLED)  ## measure how long each test takes, which decides the order of files, and show the dearest
	$(PYTEST) --junitxml=build/tests.xml $(ARGS)
	$(BIN)/python -m tests.durations --read build/tests.xml

test-next: $(INSTALLED)  ## the tests that use vLLM, on vLLM 0.33 (NEXT="paths" chooses some of them)
	PYTHONPATH=$$(tools/vllm-next.sh) $(PYTEST) $(or $(NEXT),tests/contract tests/engine) $(ARGS)

test-vllm: $(INSTALLED)  ## vLLM's own scheduler tests, with this package and without: they must end alike
	$(BIN)/python -m tests.vllms $(ARGS)

record: $(INSTALLED)  ## compare what the scheduler and engines do, step by step, with the record of it
	$(BIN)/python -m tests.record $(ARGS)

docs: $(INSTALLED)  ## the documents as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(INSTALLED)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## mypy
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff fix and format everything
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED)  ## build or refresh .venv (PYTHON=... chooses the interpreter)

# The stamp is written last: an interrupted installation is continued by the next `make`.
$(INSTALLED): pyproject.toml tools/install.sh docker/install-cpu.sh docker/pip.sh tools/vllm-metadata/pyproject.toml
	@tools/install.sh
	@touch $@

clean:  ## remove .venv, build output and caches
	rm -rf .venv build dist tools/vllm-metadata/build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf *.egg-info tools/vllm-metadata/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
