# make demo     train the built-in tiny Gemma on sums, with a supervised cold start and GRPO: four to six minutes on two cores
# make test     every test
# make check    the tests, and ruff
# All three create the environment .venv first, from requirements.txt; only python 3.11 with venv has to be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check clean

demo: $(VENV)/ready
	$(BIN)/python train.py --use_grpo

test: $(VENV)/ready
	$(BIN)/python -m pytest -q

check: test
	$(BIN)/ruff check .

$(VENV)/ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	touch $@

clean:
	rm -rf $(VENV)
