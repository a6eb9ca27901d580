# Two commands set everything up on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
TOFU ?= ../shared/data/tofu
BIN = $(VENV)/bin
# The suite runs tests on two processes of one thread each: tiny models gain nothing from more.
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
TRANSFORMERS_OLDEST = 5.17.0

.PHONY: install demo test check format test-slow test-lm-eval test-gpu test-oldest tofu-small bench-models clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/divdec demo

tofu-small: install
	$(BIN)/python benchmarks/tofu_small.py --data $(TOFU)

# Target and pair for benchmarks/decoding.py, about half an hour once.
bench-models: install
	$(BIN)/python benchmarks/bench_models.py --data $(TOFU) --output runs/bench-models

test: install
	$(PYTEST) -n 2

test-slow: install
	$(PYTEST) -m slow --timeout 3600

# lm-eval on a bundle; it brings 28 packages of its own.
test-lm-eval: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lm-eval]'
	$(PYTEST) tests/evaluation/test_harness.py

test-gpu: install
	$(PYTEST) -m gpu

# The oldest transformers that pyproject.toml admits, in an environment of its own.
test-oldest: $(VENV)-oldest/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)-oldest/bin/python -m pytest -n 2

$(VENV)-oldest/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	grep -vE '^(transformers|tokenizers|huggingface-hub)==' constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(VENV)-oldest/constraints.txt \
		'transformers==$(TRANSFORMERS_OLDEST)' --editable '.[dev]'
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VENV)-oldest .pytest_cache .ruff_cache .import_linter_cache
