# make demo        three models on an emulated inf2.48xlarge, in the foreground
# make test        style, types and the tests without a fleet, on all cores
#                  LIVE=1: also the fleets and kills; SLOW=1: everything
#                  REAL=1: also the Neuron packages' own code (CONTRIBUTING.md)
# make test-fast, test-live, test-long, test-real    one part of these alone
# make coverage    the tests without a fleet, and the lines and branches that none of them reaches
# make bench-check compare the hot paths' CPU time with that of a commit (BASE=HEAD~1)
# make demo-check  start the demo, ask every model, stop
# make venv        only the environment

unexport PYTHONDONTWRITEBYTECODE # each process of the tests would compile every module anew
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
# One more than processors, since many tests wait.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
BASE ?= HEAD~1
LONG := soak or browser or compile or slow

.PHONY: demo demo-check test test-fast test-live test-long test-real lint venv chromium coverage bench-check

venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "PyTorch is a download of 0.2 GB as a CPU build, and of more than 2 GB as a CUDA build; the rest is 0.5 GB."
	$(if $(TORCH_INDEX_URL),,@echo "pip's own index may give the CUDA build: TORCH_INDEX_URL names another (README.md, Quick start).")
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check $(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)') torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,dev]'
	@$(BIN)/python -c 'import torch; cuda = torch.version.cuda; cuda and print("warning: this PyTorch is a CUDA build", \
		f"({cuda}), gigabytes that nothing here uses: rm -r .venv, then set TORCH_INDEX_URL")'
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

# mypy takes one core for a minute where nothing is cached, so the fast tests run beside it.
test: venv
	@$(MAKE) --no-print-directory -j2 lint test-fast
	@$(if $(LIVE)$(SLOW),$(MAKE) --no-print-directory test-live)
	@$(if $(SLOW),$(MAKE) --no-print-directory test-long)
	@$(if $(REAL),$(MAKE) --no-print-directory test-real)

test-fast: venv
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not (live or real or $(LONG))" $(PYTEST_ARGS)

# One after the other: each fleet takes all cores.
test-live: venv
	$(BIN)/pytest -m "live and not (real or $(LONG))" $(PYTEST_ARGS)

test-long: venv chromium
	$(BIN)/pytest -m "($(LONG)) and not real" $(PYTEST_ARGS)
	EXAMPLES=300 $(BIN)/pytest -m "not ($(LONG))" tests/properties $(PYTEST_ARGS)

# Skips with what to set where no sources are named.
test-real: venv
	$(BIN)/pytest -n $(WORKERS) -m real $(PYTEST_ARGS)

# Lines and branches that no test without a fleet reaches.
coverage: venv
	$(BIN)/pytest -n $(WORKERS) -m "not (live or real or $(LONG))" --cov --cov-report=term $(PYTEST_ARGS)

bench-check: venv
	$(BIN)/python -m benchmarks.check --base $(BASE)
