# Everything a contributor runs. Each target sets up what it needs and needs no other target before it:
# the first one makes a virtual environment in .venv (some minutes, mostly torch), the next ones find it.
#
#   make test ARGS="-k plan"     more options for pytest
#   make demo PYTHON=python3.12  another interpreter for a new .venv
.POSIX:
.NOTPARALLEL:

PYTHON = python3
JOBS = 2
ARGS =
VENV = .venv
BIN = $(VENV)/bin
TESTED = $(VENV)/.installed-test
LINTED = $(VENV)/.installed-lint
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# One thread per test process: two workers with all cores each would only wait for one another.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST = DMCONFIG_CACHE="$$(pwd)/build/cache" $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
MATRIX = build/matrix
# What `make test-matrix` runs: the part that reaches into torch. Where CUDA is real, virtual devices need it hidden.
MATRIX_TESTS = tests/unit/virtual tests/integration/test_placements.py tests/integration/test_split.py \
  tests/integration/test_life.py tests/integration/test_models.py tests/integration/test_adapters.py \
  tests/integration/test_connected_pipelines.py tests/integration/test_rehearse_changes.py
HIDDEN = CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=-1 ONEAPI_DEVICE_SELECTOR='*:cpu'

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: $(TESTED) ## plan the digits example, then draw a seven
	@mkdir -p out
	$(BIN)/dmconfig plan examples/digits.yaml
	$(BIN)/dmconfig run examples/digits.yaml --prompt seven --seed 0 --out out/seven.png
	@echo "The picture is in $$(pwd)/out/seven.png"

test: $(TESTED) ## all tests, in parallel
	$(PYTEST) $(ARGS)

quick: $(TESTED) ## the tests that take a moment
	$(PYTEST) -m 'not slow' $(ARGS)

placements: $(TESTED) ## place every kind of pipeline in every way, and write the table in docs/placements.md anew
	$(PYTEST) -p tests.placement_table tests/integration/test_matrix.py $(ARGS)

test-matrix: $(TESTED) ## virtual devices on the oldest, the pinned and the newest torch (10 GB under build/)
	@[ -x $(MATRIX)/oldest/bin/pip ] || $(BIN)/python -m venv $(MATRIX)/oldest
	@[ -x $(MATRIX)/newest/bin/pip ] || $(BIN)/python -m venv $(MATRIX)/newest
	@echo "installing the oldest supported versions, and the newest torch, into $(MATRIX)"
	@$(MATRIX)/oldest/bin/python -m pip install -qq --disable-pip-version-check -c constraints-oldest.txt -e '.[test]'
	@grep -v '^torch==' constraints.txt > $(MATRIX)/constraints-newest.txt
	@$(MATRIX)/newest/bin/python -m pip install -qq --disable-pip-version-check --upgrade \
	  -c $(MATRIX)/constraints-newest.txt torch -e '.[test]'
	@echo "real accelerators are hidden from these tests: $(HIDDEN)"
	@failed=0; \
	for environment in $(MATRIX)/oldest $(VENV) $(MATRIX)/newest; do \
	  $$environment/bin/python -m pip list --disable-pip-version-check | \
	    grep -E '^(torch|diffusers|transformers|accelerate) ' | tr -s ' \n' ' '; echo; \
	  $(HIDDEN) $(ONE_THREAD) $$environment/bin/python -m pytest -q -n $(JOBS) $(MATRIX_TESTS) $(ARGS) || failed=1; \
	done; \
	exit $$failed

lint: $(LINTED) ## ruff and mypy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(TESTED) ## time the commands, plans, the loading of a 2 GB pipeline and the disk tier, see benchmarks/
	@failed=0; \
	$(BIN)/python benchmarks/startup.py || failed=1; \
	$(BIN)/python benchmarks/plan_speed.py || failed=1; \
	$(BIN)/python benchmarks/placement_quality.py || failed=1; \
	$(BIN)/python benchmarks/rehearse_catalogue.py || failed=1; \
	$(BIN)/python benchmarks/load.py || failed=1; \
	$(BIN)/python benchmarks/disk_tier.py || failed=1; \
	exit $$failed

schema: $(TESTED) ## write the JSON Schemas of specs, machine files, plans, rehearsals and sweeps anew
	@mkdir -p build schemas
	$(BIN)/dmconfig schema > build/schema.json
	$(BIN)/dmconfig machine --schema > build/machine.json
	$(BIN)/dmconfig schema --plan > build/plan.json
	$(BIN)/dmconfig schema --rehearsal > build/rehearsal.json
	$(BIN)/dmconfig schema --sweep > build/sweep.json
	@mv build/schema.json schemas/dmconfig-1.schema.json
	@mv build/machine.json schemas/machine-1.schema.json
	@mv build/plan.json schemas/plan-1.schema.json
	@mv build/rehearsal.json schemas/rehearsal-1.schema.json
	@mv build/sweep.json schemas/sweep-1.schema.json
	@echo "wrote the schemas of specs, machine files, plans, rehearsals and sweeps in schemas/"

reference: $(TESTED) ## write the pages of keys and of error codes anew, from the models
	$(BIN)/python tools/reference.py

layouts: $(TESTED) ## write the packaged layouts anew, from the packaged configs
	$(BIN)/python tools/layouts.py

clean: ## remove the environment and everything made
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find dmconfig tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# pip is the last thing that venv writes, so its presence says that the environment is whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dmconfig needs Python 3.11 or newer, for instance: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The stamps say which extras are installed. They do not depend on pip by age: installing may renew it.
$(TESTED): pyproject.toml constraints.txt
	@[ -x $(BIN)/pip ] || $(MAKE) -s $(BIN)/pip
	@echo "installing dmconfig and what its tests need into $(VENV)"
	@$(PIP) -e '.[test]'
	@touch $(TESTED)

$(LINTED): pyproject.toml constraints.txt
	@[ -x $(BIN)/pip ] || $(MAKE) -s $(BIN)/pip
	@echo "installing dmconfig and what its tests and linters need into $(VENV)"
	@$(PIP) -e '.[test,lint]'
	@touch $(TESTED) $(LINTED)

.PHONY: help demo test quick placements test-matrix lint bench schema reference layouts clean
