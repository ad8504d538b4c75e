# make help lists the targets. PYTHON= chooses the interpreter, VENV= an existing environment.
PYTHON ?= python3
VENV ?= .venv
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ifneq ($(words $(VENV)),1)
$(error VENV="$(VENV)" must be a path without spaces)
endif

# make paper: how large, on what, and further key=value for every step, e.g. OVERRIDES="trainer.device=cuda tracking=none"
SCALE ?= laptop
DATA ?= synthetic
OVERRIDES ?=
# make figures, make report: folders of runs or sweeps, or results files, instead of everything in outputs/
RUNS ?=
RESULTS ?=
SOURCES = $(if $(strip $(RESULTS)),--results $(strip $(RESULTS)),$(if $(strip $(RUNS)),--runs $(strip $(RUNS))))

BIN := $(VENV)/bin
READY := $(VENV)/.gramgn-ready
KERNELS := $(VENV)/.gramgn-kernels

# The mark of an environment names its checkout: one that another checkout made is looked at again.
ifneq ($(filter-out $(shell pwd -P),$(shell cat $(READY) 2> /dev/null)),)
.PHONY: $(READY)
endif

# Prints the folder that an environment's gramgn is installed from, if it is installed from a checkout.
define WHOSE
import importlib.metadata as m, json, pathlib, urllib.parse as u
url = json.loads(m.distribution("gramgn").read_text("direct_url.json"))["url"]
print(pathlib.Path(u.unquote(u.urlsplit(url).path)).resolve())
endef
export WHOSE

# Compiles the kernels aside and renames the library to its place next to the sources, so that a build that fails or is
# interrupted leaves the library of before. $(1): the exit status where that is impossible.
define BUILD_KERNELS
	@folder=src/gramgn/optim/kernels; work=; trap 'rm -rf $$work' EXIT; trap 'exit 130' INT TERM; \
	if [ ! -w $$folder ]; then reason="$$folder cannot be written"; \
	else \
	    mkdir -p build; work=$$(mktemp -d build/kernels.XXXXXX); \
	    $(BIN)/python setup.py build_ext --build-temp $$work --build-lib $$work > build/kernels.log 2>&1 || true; \
	    if mv -f $$work/$${folder#src/}/compiled* $$folder 2>/dev/null; then exit 0; fi; \
	    if command -v "$${CXX:-c++}" > /dev/null; then reason="they do not compile (the compiler's messages: build/kernels.log)"; \
	    else reason="there is no C++ compiler ($${CXX:-c++})"; fi; \
	fi; \
	if PYTHONPATH=src $(BIN)/python -c 'import sys; from gramgn.optim.kernels import missing; sys.exit(missing() is not None)'; then \
	    if [ -w $$folder ] || [ $(1) != 0 ]; then echo "the compiled kernels are not rebuilt, since $$reason; the present ones are up to date and stay in use" >&2; fi; \
	else echo "the compiled kernels are not built, since $$reason; everything works without them, but takes longer" >&2; fi; \
	exit $(1)
endef

.PHONY: help env kernels demo test test-slurm test-fast sanitize lint format docs paper theory evidence results figures report bench bench-pipeline gpu-report clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

env: $(KERNELS) ## build the environment .venv from requirements.lock (about 2 to 10 minutes the first time)

kernels: $(READY) ## rebuild the compiled kernels; CXX=clang++ chooses the compiler
	$(call BUILD_KERNELS,1)
	@touch $(KERNELS)

# An environment without our mark is made, or, where VENV= names one that exists, only added to: a torch that is
# there already (a machine's own CUDA build) is kept if pyproject.toml allows it.
$(READY): requirements.lock pyproject.toml
	@command -v "$(PYTHON)" > /dev/null || { echo "there is no $(PYTHON); choose a Python 3.11 to 3.13 with make PYTHON=<its path> $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python {v[0]}.{v[1]} is not supported: 3.11 to 3.13 are. Choose one with make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@if [ ! -x $(BIN)/python ]; then echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); fi
	@owner=$$($(BIN)/python -c "$$WHOSE" 2>/dev/null || true); \
	if [ -d "$$owner" ] && [ "$$owner" != "$$(pwd -P)" ] && [ -z "$(ADOPT)" ]; then \
	    echo "$(VENV) is the environment of the checkout $$owner, and installing this one there would replace that one." >&2; \
	    echo "Leave VENV= out to get an environment of this checkout (make env), or give ADOPT=yes to replace it." >&2; exit 1; fi
	@if [ ! -e $(VENV)/.gramgn-made ] && $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    $(BIN)/python -c 'import sys, torch; v = torch.__version__; sys.exit(0 if tuple(map(int, v.split(".")[:2])) >= (2, 11) else f"the torch of $(VENV) is {v}: 2.11 or newer is needed. Upgrade it, or leave VENV= away to get an environment of its own")'; \
	    echo "keeping the torch of $(VENV)"; grep -vE '^(torch|torchvision)==' requirements.lock > $(VENV)/.gramgn-lock; \
	else touch $(VENV)/.gramgn-made; cp requirements.lock $(VENV)/.gramgn-lock; fi
	@echo "installing the packages of requirements.lock into $(VENV) (some minutes, several GB with CUDA's)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/.gramgn-lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@pwd -P > $@

# Again when a source has changed. Nothing needs the kernels, so a machine without a compiler gets on without them.
$(KERNELS): $(READY) setup.py $(wildcard src/gramgn/optim/kernels/*.cpp src/gramgn/optim/kernels/*.h)
	$(call BUILD_KERNELS,0)
	@touch $@

demo: $(KERNELS) ## five short trainings on synthetic radiographs, a table and a figure (under 5 minutes)
	@$(BIN)/python scripts/demo.py

test: $(KERNELS) ## all tests but those of test-slurm
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slurm"

test-slurm: $(KERNELS) ## sweeps on a cluster, in a Slurm of one node that the tests start (root; slurm-wlm and munge)
	@$(BIN)/python -m pytest -m slurm tests/integration

test-fast: $(KERNELS) ## the tests without the ones that start whole processes
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/numerics tests/contract

sanitize: ## the compiled kernels on odd shapes under AddressSanitizer and UndefinedBehaviorSanitizer
	@mkdir -p build
	@$${CXX:-c++} -O1 -g -std=c++17 -fsanitize=address,undefined -fno-sanitize-recover=undefined -w tests/kernels/odd_shapes.cpp -o build/odd_shapes
	@build/odd_shapes

lint: $(READY) ## style, docstrings, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY) ## put the code into its standard form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The site is built from a copy in which the published results lie below the pages that show them.
docs: $(READY) ## build the documentation into site/, strictly: a broken internal link is an error
	@rm -rf build/docs site && mkdir -p build && cp -R docs build/docs && cp -R outputs/results build/docs/published
	@for page in build/docs/*.md; do sed -i.bak 's#\.\./outputs/results/#published/#g' $$page && rm $$page.bak; done
	@sed -i.bak 's#\.\./\.\./docs/#../#g' build/docs/published/README.md && rm build/docs/published/README.md.bak
	@$(BIN)/zensical build --strict --clean

paper: $(KERNELS) ## the paper's experiments, one sweep after another; SCALE=laptop|desk|paper DATA=synthetic|real (about an hour at laptop scale)
	@$(BIN)/python scripts/paper.py --scale "$(SCALE)" --data "$(DATA)" $(OVERRIDES)

evidence: $(KERNELS) ## GGN next to tuned baselines, as docs/protocol.md plans it; BLOCK=tune|refine|final|paper|desk|desk_paper|sensitivity|clock for one part (16 hours of one core in all)
	@$(BIN)/python scripts/evidence.py $(if $(BLOCK),--block $(BLOCK)) $(OVERRIDES)

results: $(READY) ## the tables and figures of docs/results.md from outputs/results/evidence_*.csv
	@$(BIN)/python scripts/results.py

theory: $(KERNELS) ## watch the paper's two theorems and its cost analysis (under 10 minutes)
	@$(BIN)/python scripts/theory.py
	@$(BIN)/python benchmarks/cost.py

figures: $(READY) ## draw the paper's runs into outputs/figures; RUNS=<folders> draws any runs, RESULTS=<CSV files> into outputs/results/figures
	@$(BIN)/python scripts/make_figures.py $(SOURCES)

report: $(READY) ## one page about all runs, outputs/report/index.html, or about RUNS=<folders>, RESULTS=<CSV files>
	@$(BIN)/python scripts/make_report.py $(SOURCES)

bench: $(KERNELS) ## measure a step relative to SGD's and other packages' (about 20 minutes, on an idle machine)
	@$(BIN)/python benchmarks/step.py --breakdown --convolutions
	@$(BIN)/python benchmarks/terms.py
	@$(BIN)/python benchmarks/ranks.py

bench-pipeline: $(KERNELS) ## measure start-up, preparing, overhead and memory of the pipeline
	@$(BIN)/python benchmarks/pipeline.py

gpu-report: $(KERNELS) ## the step on a CUDA device, into outputs/results (under 8 minutes)
	@$(BIN)/python benchmarks/step.py --device cuda --breakdown --report --limit-s 300

clean: ## remove caches (no data, no results)
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
