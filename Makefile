# The two commands of the README are `make demo` and `make test`. Both need only python3 (>= 3.11,
# with venv); everything else is installed into .venv, which `make clean` removes. What the tests need
# of Debian's packages, `make test` installs where it may.

PYTHON ?= python3
VENV ?= .venv
# A wheel index with CPU builds of torch, where you can reach one; empty means PyPI, whose torch
# brings about 7 GB of CUDA packages (2 to 10 minutes, once).
TORCH_INDEX ?=

BIN := $(VENV)/bin
UV := $(BIN)/python -m uv
TORCH_INDEX_OPTIONS := $(if $(TORCH_INDEX),--index $(TORCH_INDEX) --index-strategy unsafe-best-match)

export PYTHONSAFEPATH = 1
# Otherwise every process compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test test-all test-package test-pairs test-random test-images test-gpu test-tpu test-pythons \
    coverage fuzz check lint types format hooks dist docs docs-serve reference \
    bench bench-fleet bench-training bench-tuning bench-reduce constraints clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

demo: $(VENV)/.installed  ## Run one training job cold, warm and on eight hosts; writes build/demo.json
	$(BIN)/python client/examples/demo.py

serve: $(VENV)/.installed  ## Start a server on 127.0.0.1:8077
	$(BIN)/graphstash serve

# More workers than a small machine has cores, because tests wait for servers. Tests that share an
# expensive server or process run in one of them (tests/conftest.py).
WORKERS ?= 6
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed $(VENV)/.packages  ## Run the tests for which .venv suffices
	$(PYTEST) $(TESTS)

# The emulator of Azure comes from npm.
NPM := https://registry.npmjs.org/azurite
ASK_NPM := $(BIN)/python -c 'from urllib.request import urlopen; \
    urlopen("$(NPM)", timeout=30); print("--npm")' 2>/dev/null

test-all: $(VENV)/.installed $(VENV)/.packages  ## Run every test, with every compiler version
	npm=$$($(ASK_NPM)); $(PYTEST) --extended $$npm $(TESTS) && { test -n "$$npm" \
	    || echo 'NOT RUN: tests marked npm (blobs in Azure): $(NPM) gives no answer.'; }
	$(if $(TESTS),,@$(MAKE) --no-print-directory .test-images)

# The map is the table under "Which tests prove a change" in CONTRIBUTING.md.
test-package: $(VENV)/.installed $(VENV)/.packages  ## Run the tests that the map names for PACKAGE=<folder>
	@tests=$$(sed -n 's#^| $(PACKAGE:/=) | \(.*\) |$$#\1#p' CONTRIBUTING.md) && \
	    test -n "$$tests" || { echo 'CONTRIBUTING.md maps no package $(PACKAGE)' >&2; exit 1; } && \
	    $(MAKE) --no-print-directory test TESTS="$$tests"

# To repeat a round: make test-random SEEDS=<the seed that the round printed>
ROUNDS ?= 20
SEEDS ?= $(shell shuf -i 1-1000000 -n $(ROUNDS))

test-random: $(VENV)/.installed $(VENV)/.packages  ## Run the tests ROUNDS times in random order with random seeds
	@for seed in $(SEEDS); do \
	    echo "seed $$seed, load $$(cut -d' ' -f1-3 /proc/loadavg)" && \
	    PYTHONHASHSEED=$$seed $(PYTEST) --random-order --random-order-seed=$$seed \
	        --hypothesis-seed=$$seed $(TESTS) || exit; done

PAIRS ?= 10000
SEED ?= 1

test-pairs: $(VENV)/.installed  ## Compare the keys of PAIRS generated pairs of programs for each compiler
	$(BIN)/python -m pytest --extended -rP --pairs $(PAIRS) --seed-of-pairs $(SEED) \
	    tests/compilers/wrong_hits/test_generated.py

# Beside everything else, these build an image and start some twenty containers with names of their
# own, and remove them. The engine may be any that `docker` and `docker compose` reach.
HAS_ENGINE := docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1
NO_ENGINE := tests/deploy/test_images.py (the image and the compose files): `docker info` and \
    `docker compose version` find no container engine

test-images: $(VENV)/.installed $(VENV)/.packages  ## Run the image and the compose files in Docker
	@$(HAS_ENGINE) || { echo 'Cannot run $(NO_ENGINE).' >&2; exit 1; }
	$(BIN)/python -m pytest --extended --images tests/deploy/test_images.py

.PHONY: .test-images
.test-images:
	@if $(HAS_ENGINE); then $(MAKE) test-images; else echo 'NOT RUN: $(NO_ENGINE).'; fi

test-gpu: $(VENV)/.installed  ## Run the tests that need a GPU of NVIDIA, and print what they show
	@$(BIN)/python tests/support/require_device.py gpu
	$(BIN)/python -m pytest --gpu tests/gpu

test-tpu: $(VENV)/.installed  ## Run the tests that need a TPU VM, and print what they show
	@$(BIN)/python tests/support/require_device.py tpu
	$(BIN)/python -m pytest --tpu tests/tpu

# Tests that need no compiler.
LIGHT_TESTS ?= tests/unit tests/service tests/client/doctor tests/client/tuning \
    $(wildcard tests/client/*.py)
PYTHONS ?= 3.12 3.13

test-pythons: $(VENV)/.installed $(VENV)/.packages  ## Run the tests without compilers on PYTHONS
	for version in $(PYTHONS); do \
	    other=$(VENV)-python$$version && \
	    $(UV) venv --quiet --allow-existing --python $$version $$other && \
	    $(UV) pip install --quiet --python $$other/bin/python --constraint constraints.txt \
	        --group test --editable '.[server,postgres,s3,signing,tracing]' && \
	    $$other/bin/python -m pytest $(LIGHT_TESTS) || exit; done

SOURCES := client/graphstash service/graphstash_server schema/graphstash_schema

coverage: $(VENV)/.installed $(VENV)/.packages  ## Run the tests with coverage; fails below fail_under
	$(PYTEST) -m 'not untraced' $(SOURCES:%=--cov=$(CURDIR)/%) $(TESTS)

FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= paths headers bodies signatures conversations

fuzz: $(VENV)/.installed  ## Fuzz the parsers, FUZZ_SECONDS each; inputs stay in build/fuzz
	for target in $(FUZZ_TARGETS); do \
	    PYTHONPATH=tests/fuzz $(BIN)/python tests/fuzz/$$target.py \
	        -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 || exit; done

# The parts are independent: make runs them side by side and prints the output of each one whole.
check: $(VENV)/.installed  ## Run ruff, import-linter, towncrier, mypy, and the checks of the documentation
	@$(MAKE) --no-print-directory --jobs --output-sync=target lint types .snippets .reference .site

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@output=$$($(BIN)/towncrier build --draft --version next 2>&1) || { echo "$$output"; exit 1; }

# mypy ends with status 2 if its two processes do not start within three seconds, as on a busy machine.
# It has no setting for this time.
types: $(VENV)/.installed
	$(BIN)/mypy --num-workers 2 || { test $$? -eq 2 && $(BIN)/mypy; }
	$(BIN)/mypy $(wildcard docs/tools/*.py)

# Material for MkDocs prints a note about MkDocs 2 otherwise; pyproject.toml keeps MkDocs 1. No --quiet:
# it hides warnings from the strict mode, too.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

docs: .snippets .reference .site  ## Build the documentation into build/site; a dead link is an error

.PHONY: .snippets .reference .site
.snippets: $(VENV)/.installed
	$(BIN)/python docs/tools/snippets.py

.reference: $(VENV)/.installed
	$(BIN)/python docs/tools/reference.py --check

.site: $(VENV)/.installed
	$(MKDOCS) build

docs-serve: $(VENV)/.installed  ## Serve the documentation on 127.0.0.1:8000, with live reload
	$(MKDOCS) serve

reference: $(VENV)/.installed  ## Generate docs/reference from the code
	$(BIN)/python docs/tools/reference.py

format: $(VENV)/.installed  ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(VENV)/.installed  ## Let git run the checks before each commit
	$(BIN)/pre-commit install

dist: $(VENV)/.installed  ## Build the sdist, and the wheel from it, into dist/
	$(UV) build --out-dir dist

bench: $(VENV)/.installed  ## Measure side by side with peers; writes build/bench*.json
	$(BIN)/python tests/benchmarks/run.py

bench-fleet: $(VENV)/.installed  ## Simulate fleets of hosts (docs/sizing.md); writes build/bench-fleet.json
	$(BIN)/python tests/benchmarks/simulation/run.py $(BENCH_OPTIONS)

bench-training: $(VENV)/.installed  ## Compare training loops; writes build/bench-training.{md,json,png}
	$(BIN)/python tests/benchmarks/training/run.py $(BENCH_OPTIONS)

bench-tuning: $(VENV)/.installed  ## Compare searchers (BENCH_OPTIONS="--gemm 256": also on TVM); writes build/bench-tuning.{md,json,png}
	$(BIN)/python tests/benchmarks/tuning/run.py $(BENCH_OPTIONS)

bench-reduce: $(VENV)/.installed  ## Sum sparse gradients over shaped links (needs root; else loopback); writes build/bench-reduce.{md,json,png}
	$(BIN)/python tests/benchmarks/reduce/run.py $(BENCH_OPTIONS)

COMPILE := $(UV) pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
    --no-emit-index-url --no-header --no-annotate

# Every extra that the versions of torch in the group `dev` allow: torch-xla needs later ones.
LIST_EXTRAS := $(PYTHON) -c 'import tomllib; \
    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])'

constraints:  ## Update constraints.txt and tests/environments/*.txt
	$(COMPILE) $(addprefix --extra=,$(filter-out torch-xla,$(shell $(LIST_EXTRAS)))) --group dev \
	    pyproject.toml --output-file constraints.txt
	for name in $(basename $(wildcard tests/environments/*.in)); do \
	    $(COMPILE) $$name.in pyproject.toml --output-file $$name.txt || exit; done

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m uv --version >/dev/null 2>&1 \
	    || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@echo "Installing into $(VENV), torch and torch_xla included:" \
	    "$(if $(TORCH_INDEX),about 1 GB,about 7 GB of packages; TORCH_INDEX=<a CPU wheel index> makes it 1 GB)."
	$(UV) pip install --python $(BIN)/python --constraint constraints.txt \
	    $(TORCH_INDEX_OPTIONS) --group dev --editable '.[server,postgres,s3,gcs,azure,signing,tracing]'
	@touch $@

# Needs root, or sudo, where something is missing; otherwise it says what to install.
$(VENV)/.packages: .ci/packages | $(VENV)/.installed
	.ci/packages
	@touch $@

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
