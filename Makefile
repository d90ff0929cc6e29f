# The commands of the README, and what CI runs. A machine needs Python 3.11 or newer, git and make.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := core plugins/schedulers plugins/kv_cache plugins/attention plugins/models plugins/samplers plugins/grammars plugins/executors plugins/observers plugins/drafters plugins/kv_tiers apps/lab apps/batch apps/cluster apps/server

unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, which import the same modules: they are compiled once

.PHONY: demo test test-slow test-full test-page test-redis lint types rules docs check clean test-cluster test-tekken test-clients

demo: $(VENV)/.demo  ## generate text from the bundled model
	$(BIN)/dovetail generate demo "ROMEO:" --max-tokens 120
	@echo "Now run: source $(BIN)/activate"

test: $(VENV)/.dev  ## the quick test suite
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.dev  ## tests above the budget of a quick one: processes, ranks, suites, kernels
	DOVETAIL_TEST_PROFILE=slow $(BIN)/python -m pytest -n 2

test-full: $(VENV)/.dev  ## all tests, with the numbers of examples that a release asks for: about an hour
	DOVETAIL_TEST_PROFILE=full $(BIN)/python -m pytest -n 2

test-page: docs  ## the server's page, a report and the site in headless Chromium, which is installed from Debian's packages if it isn't there
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || true
	DOVETAIL_TEST_PROFILE=full DOVETAIL_TEST_SITE=$(CURDIR)/site $(BIN)/python -m pytest -rs tests/page

test-redis: $(VENV)/.dev  ## the example package dovetail-redis with a real server, which is installed from Debian's packages if it isn't there
	command -v redis-server >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; } || true
	DOVETAIL_TEST_PROFILE=full $(BIN)/python -m pytest -rs tests/examples/test_redis.py

# Ray takes some 750 MB, which is why it has an environment of its own. Its token authentication stays on.
test-cluster: .venv-cluster/.done  ## tests of what runs on Ray, with Ray itself, on this machine
	DOVETAIL_TEST_RAY=1 RAY_AUTH_MODE=token .venv-cluster/bin/python -m pytest tests/cluster

.venv-cluster/.done: pyproject.toml constraints.txt
	test -x .venv-cluster/bin/python || $(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,ray,router]"
	touch $@

test-clients: $(VENV)/.dev  ## clients of other projects, each in an environment of its own, deleted afterwards; some: CLIENTS="openai litellm"
	$(BIN)/python -m tests.clients $(CLIENTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy $(PACKAGES)

rules: $(VENV)/.dev  ## who may import whom
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

check: lint types rules docs test test-slow

# mistral-common takes older versions of numpy than constraints.txt has, which is why it has an environment of its own.
test-tekken: .venv-tekken/.done  ## the example package dovetail-tekken against mistral-common
	cd examples/plugins/dovetail-tekken && $(CURDIR)/.venv-tekken/bin/python -m pytest

.venv-tekken/.done: pyproject.toml examples/plugins/dovetail-tekken/pyproject.toml
	test -x .venv-tekken/bin/python || $(PYTHON) -m venv .venv-tekken
	.venv-tekken/bin/python -m pip install --quiet -e . -e "examples/plugins/dovetail-tekken[test]"
	touch $@

# constraints.txt pins what CI has seen working. The pip that comes with Python 3.11 takes four times as long to choose versions as the present one.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Dovetail needs Python 3.11 or newer: none found. Name one with PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[torch]"
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .venv-cluster .venv-tekken build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
