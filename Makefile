# Two commands for a fresh machine: `make bench` and `make test`. Both set up .venv first, unless PYTHON names an
# existing environment, into which the project is installed and which is left alone otherwise.

.DEFAULT_GOAL := help
SHELL := /bin/bash

# An existing environment's Python; unset, .venv is made with BASE_PYTHON.
PYTHON ?=
BASE_PYTHON ?= python3
# A requirement to install before all else, to choose a build of torch: TORCH=torch==2.13.0, or with TORCH_INDEX.
TORCH ?=
TORCH_INDEX ?=
# What `make architectures` compiles for, and words in the paths of what it compiles: all without.
ARCH ?=
FILES ?=
# What to pass to `python -m bench` and to pytest.
BENCH ?=
TEST ?=
# Processes that run tests side by side; unset, as many as there are cores and GPU memory for.
WORKERS ?=

CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
PY := $(if $(PYTHON),$(PYTHON),.venv/bin/python)
INSTALLED := build/installed-$(shell echo '$(PY)' | cksum | cut -d' ' -f1)
# What an installation is made from; the other files of _build/ serve the documents and the checks.
BUILDERS := architectures backend environment install together
BUILT_FROM := setup.py pyproject.toml $(BUILDERS:%=_build/%.py) $(shell find csrc -type f -not -name README.md 2>/dev/null)
# A requirement list stands in pyproject.toml alone.
extra = $$($(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")
CLANG_FORMAT = $(PY) -c 'import sys, clang_format; sys.exit(clang_format.clang_format())'
# An environment that lost the package, or was made anew at the same place, is installed into again.
ifneq ($(shell $(PY) -c "import importlib.metadata as m; print(m.version('kernel_ladder'))" 2>/dev/null),)
STALE :=
else
STALE := again
endif

.PHONY: help install test bench architectures docs lint format clean again

help:  ## show this list
	@echo "make <target> [PYTHON=/path/to/python] [TORCH=torch==2.13.0] [TORCH_INDEX=url]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "TEST and BENCH pass options on: make test TEST='-k gelu', make bench BENCH='--quick --op gelu'"

$(if $(PYTHON),,$(PY)):
	@echo "== Making .venv with $(BASE_PYTHON) (seconds)"
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kernel_ladder needs Python 3.11 or later; name one with BASE_PYTHON=")'
	@$(BASE_PYTHON) -m venv .venv

$(INSTALLED): $(if $(PYTHON),,$(PY)) $(BUILT_FROM) $(STALE)
	@echo "== Installing into $(PY): torch if it is missing (a download of 0.2 to 3 GB), then the package; with an nvcc"
	@echo "   its CUDA extension, compiled by $(CORES) cores (8 minutes on 2 cores, 4 on 4, 2 on 8 or more)"
	$(if $(TORCH),@$(PY) -m pip install -q "$(TORCH)" $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)"))
	@$(PY) _build/install.py
	@mkdir -p build && touch $@

again:

install: $(INSTALLED)  ## set up .venv and install the package into it
	@$(PY) -m kernel_ladder doctor
	$(if $(PYTHON),,@printf '\n== Installed. In every new shell, before the commands of README.md:\n   source .venv/bin/activate\n')

test: $(INSTALLED)  ## set up and run the tests
	@$(PY) -m pip install -q $(call extra,test) $(call extra,xla)
	@$(PY) -m pip install -q $(call extra,models) || echo "== $(call extra,models) cannot be installed: tests of Hugging Face's models are skipped"
	@$(PY) -m kernel_ladder doctor
	@echo "== Running the tests (10 to 22 minutes on 2 cores without a GPU, 10 to 14 on an H200 with 16 cores, where those"
	@echo "   that need the GPU alone run first)"
	@$(PY) -m tests $(if $(WORKERS),--workers $(WORKERS)) $(TEST)

bench: $(INSTALLED)  ## set up and run the sweep
	@$(PY) -m pip install -q $(call extra,bench)
	@$(PY) -m kernel_ladder doctor
	@echo "== Running the sweep (over an hour on a GPU, minutes with BENCH=--quick; BENCH=--resume goes on)"
	@$(PY) -m bench $(BENCH)

architectures: $(INSTALLED)  ## compile csrc for every architecture that it supports (half an hour of a core; ARCH=12.0 for one)
	@$(PY) _build/architectures.py $(addprefix --arch ,$(ARCH)) $(FILES)

docs: $(INSTALLED)  ## build the documentation site into build/site, strictly (SERVE=1 to look at it)
	@$(PY) -m pip install -q $(call extra,docs)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs $(if $(SERVE),serve,build -q)

lint: $(if $(PYTHON),,$(PY))  ## ruff, mypy, clang-format, retired words, sizes, cards of the climbs: check only
	@echo "== Checking style and types (a minute)"
	@$(PY) -m pip install -q $(call extra,lint)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) _build/retired_words.py
	@$(PY) _build/sizes.py
	@$(PY) _build/cards.py
	@find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs $(CLANG_FORMAT) --dry-run -Werror

format: $(if $(PYTHON),,$(PY))  ## let ruff and clang-format rewrite the files
	@$(PY) -m pip install -q $(call extra,lint)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs $(CLANG_FORMAT) -i

clean:  ## remove what was built, not .venv
	rm -rf build dist *.egg-info kernel_ladder/_C*.so kernel_ladder/_C*.so.operators
