# Two commands do everything: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check "transformers==5.24.0" -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/python examples/train_agent.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy prefix_rewrite passes

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal
	$(BIN)/python -m pytest --doctest-modules prefix_rewrite passes -q

clean:
	rm -rf $(VENV)
