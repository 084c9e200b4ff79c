# make demo     train the built-in tiny Gemma on sums, with a supervised cold start and GRPO: three to six minutes on two cores
# make test     every test
# make check    ruff, and the tests but for the slow ones
# make test-tpu tests of the TPU path, on XLA's CPU device
# The first three create the environment .venv first, from requirements.txt, the last one .venv-tpu from requirements-tpu.txt;
# only python 3.11 with venv has to be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check test-tpu clean

demo: $(VENV)/ready
	$(BIN)/python train.py --use_grpo --output_dir outputs/demo $(if $(wildcard outputs/demo/config.json),--resume)

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

check: $(VENV)/ready
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n auto --maxprocesses 4 --dist worksteal

test-tpu: $(VENV)-tpu/ready
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 $(VENV)-tpu/bin/python -m pytest -q -n auto --maxprocesses 4 tests/test_tpu.py

$(VENV)/ready: requirements.txt
	@echo "installing torch, transformers and the rest into $(VENV): a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	touch $@

$(VENV)-tpu/ready: requirements-tpu.txt
	$(PYTHON) -m venv $(VENV)-tpu
	$(VENV)-tpu/bin/pip install --quiet --requirement requirements-tpu.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-tpu
