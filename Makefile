# Two commands do everything: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint setup bench clean

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

# Each file in a process of its own, two at a time: what one leaves in torch's compiler stays there.
RUN_TESTS = OMP_NUM_THREADS=1 xargs -P 2 -n 1 $(BIN)/python -m pytest -q

test: lint
	ls tests/test_*.py | $(RUN_TESTS)
	$(BIN)/python -m pytest --doctest-modules prefix_rewrite -q

# Hours, all in all; each command takes options to measure less. Keep the machine quiet.
bench: setup
	$(BIN)/python benchmarks/ops_attention.py
	$(BIN)/python benchmarks/ops_scan.py
	$(BIN)/python benchmarks/ops_edges.py
	$(BIN)/python benchmarks/models.py --memory

clean:
	rm -rf $(VENV)
