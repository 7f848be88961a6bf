# Each target makes the virtual environment it needs (.venv) and passes ARGS on:
#   make serve ARGS="--port 8123 --dtype float32"
# PYTHON       the interpreter the environment is made from (3.10 or newer)
# JOBS         processes that share the tests out, at most 4: each may take some 2 GB (default: one for each core)
# TORCH_INDEX  a package index to take torch from, e.g. https://download.pytorch.org/whl/cu128

PYTHON ?= python3
JOBS ?= logical
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
# True on a Linux machine without an NVIDIA GPU.
WITHOUT_GPU := [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help serve test test-docker check bench docs clean

help:
	@echo 'make serve   serve the bundled model on 127.0.0.1:8000'
	@echo 'make test    all tests that need neither a GPU nor Docker'
	@echo 'make test-docker   the image and the stack, where a Docker engine runs'
	@echo 'make check   lint, formatting, types, import rules'
	@echo 'make bench   plain against speculative decoding, without HTTP'
	@echo 'make docs    write docs/configuration.md anew, from the settings'
	@echo 'make clean   remove the virtual environment and caches'

serve: $(VENV)/.installed
	@exec $(BIN)/moaserve serve $(ARGS)

bench: $(VENV)/.installed
	@exec $(BIN)/moaserve bench offline $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-docker: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m docker tests/integration/test_docker.py $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! git grep -nE '^(<{7}|>{7}) '

docs: $(VENV)/.installed
	$(BIN)/python -m app.commands.reference > docs/configuration.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	@echo 'Installing what serving needs ...'
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo 'Installing what the tests and checks need ...'
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed

# On Linux the default torch wheel brings gigabytes of CUDA libraries. A machine without an NVIDIA GPU takes the CPU wheel where
# its index can be reached; whatever is still missing afterwards, the install above takes from the default index.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo '$(PYTHON) is older than 3.10: set PYTHON=python3.x'; exit 1; }
	@echo 'Setting up $(VENV): once, a few minutes (torch alone is about 200 MB) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ -n '$(TORCH_INDEX)' ]; then \
	    $(PIP) install --no-deps --index-url '$(TORCH_INDEX)' '$(TORCH)'; \
	elif $(WITHOUT_GPU); then \
	    $(PIP) install --quiet --no-deps --retries 0 --timeout 10 --index-url '$(CPU_TORCH_INDEX)' '$(TORCH)' 2>/dev/null \
	        || echo 'CPU index not reachable: taking torch from the default index'; \
	fi
	@touch $@
