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
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(JOBS)

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

demo: $(TESTED) ## plan the digits example, then draw a seven
	@mkdir -p out
	$(BIN)/dmconfig plan examples/digits.yaml
	$(BIN)/dmconfig run examples/digits.yaml --prompt seven --seed 0 --out out/seven.png
	@echo "The picture is in $$(pwd)/out/seven.png"

test: $(TESTED) ## all tests, in parallel
	$(PYTEST) $(ARGS)

quick: $(TESTED) ## the tests that take a moment
	$(PYTEST) -m 'not slow' $(ARGS)

lint: $(LINTED) ## ruff and mypy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(TESTED) ## time the commands and the loading of a 2 GB pipeline, see benchmarks/
	@failed=0; \
	$(BIN)/python benchmarks/commands.py || failed=1; \
	$(BIN)/python benchmarks/load.py || failed=1; \
	exit $$failed

schema: $(TESTED) ## write the JSON Schema of the YAML file anew
	@mkdir -p build schemas
	$(BIN)/dmconfig schema > build/schema.json
	@mv build/schema.json schemas/dmconfig-1.schema.json
	@echo "wrote schemas/dmconfig-1.schema.json"

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

.PHONY: help demo test quick lint bench schema clean
