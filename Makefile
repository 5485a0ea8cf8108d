# make demo        three models on an emulated inf2.48xlarge, in the foreground
# make test        style, types and tests (SLOW=1: the long ones too)
# make demo-check  start the demo, ask every model, stop
# make venv        only the environment

PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
MARKS := $(if $(SLOW),,-m "not slow")

.PHONY: demo demo-check test lint venv chromium

venv: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[cpu,dev]'
	touch $@

demo: venv
	$(BIN)/corewright up placements/examples/demo.yaml

demo-check: venv
	$(BIN)/python -m tests.demo_check

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The long tests open Ray's dashboard in Debian's Chromium. Only root can install it; without it they fail and say so.
chromium:
	@if [ ! -x /usr/bin/chromium ] && [ "$$(id -u)" = 0 ]; then \
		for try in 1 2 3; do \
			apt-get update -qq; \
			DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium && break; \
		done; \
	fi

test: lint $(if $(SLOW),chromium)
	$(BIN)/pytest $(MARKS) $(PYTEST_ARGS)
