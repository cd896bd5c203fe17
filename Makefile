# `make demo` and `make test` each do all of their own set-up.
#
# On a machine with CUDA (nvidia-smi works) the environment holds the GPU build of
# vLLM, from the extra `cuda`; elsewhere the CPU build, pinned by requirements/cpu.lock.

SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS := .models
TARGET := $(MODELS)/SmolLM2-135M-Instruct
HAS_CUDA := $(shell nvidia-smi >/dev/null 2>&1 && echo 1)

ENV_INPUTS := requirements/cpu.lock requirements/install_cpu.sh \
	pyproject.toml cpu_engine/pyproject.toml
ENV_KEY := $(shell cat $(ENV_INPUTS) | sha256sum | cut -c1-16)$(if $(HAS_CUDA),-cuda)
STAMP := $(VENV)/.installed-$(ENV_KEY)

.PHONY: demo test test-full lint venv models clean

demo: venv models
	@$(BIN)/python examples/demo.py --model $(TARGET) $(DEMO_ARGS)

test: venv models
	$(BIN)/python -m pytest $(if $(FRESH),,--skip-passed) $(PYTEST_ARGS)

test-full: venv models
	$(BIN)/python -m pytest --full $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make venv: Python 3.11 or newer is needed (PYTHON=...)." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "make venv: $(PYTHON) -m venv failed; is python3-venv there?" >&2; exit 1; }
ifdef HAS_CUDA
	@$(BIN)/python -m pip install -q -e '.[cuda,dev]' gguf || \
		{ echo "make venv: '.[cuda,dev]' could not be installed; pip's message is above." >&2; exit 1; }
else
	@requirements/install_cpu.sh $(BIN)/python
endif
	@rm -f $(VENV)/.installed-* && touch $@

models: venv
	@$(BIN)/python tools/fetch_target.py $(TARGET)

clean:
	rm -rf $(VENV) $(MODELS) build dist *.egg-info cpu_engine/*.egg-info \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.gpu/*' -prune -exec rm -rf {} +
