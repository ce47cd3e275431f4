# One way in for people and for CI. `make test` and `make demo` work on a fresh machine with Python >= 3.11 only.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup test demo lint check format clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("bulkrun needs Python >= 3.11, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): minutes; on Linux, where torch comes with CUDA, 3 GB (the README has a smaller way)'
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --editable '.[dev]' # setuptools warns of every editable one
	touch $@

test: setup
	$(BIN)/python -m pytest -n 3

data/functions.parquet: | setup
	$(BIN)/python examples/extract_functions.py --out $@

# The main job on real input, then what a user would do next: ask DuckDB.
demo: setup data/functions.parquet
	$(BIN)/bulkrun submit jobs/summarize.yaml; status=$$?; [ $$status -eq 0 ] || [ $$status -eq 3 ]
	$(BIN)/bulkrun query out/summaries "SELECT module, name, response FROM results USING SAMPLE reservoir(12 ROWS) REPEATABLE (7)"
	$(BIN)/bulkrun query out/summaries "SELECT count(*) AS rows, count(error_code) AS errors, round(avg(prompt_tokens), 1) AS prompt_tokens, round(avg(completion_tokens), 1) AS completion_tokens FROM results"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
