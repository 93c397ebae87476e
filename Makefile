# SPDX-License-Identifier: Apache-2.0
# Every target makes what it needs: the environments lie in .venv/cpu and .venv/cuda.
PYTHON ?= python3
ENVIRONMENT = $(PYTHON) scripts/environment.py
OLDEST_VLLM = 0.26.0
NEWEST_VLLM = 0.33.0

.PHONY: demo test lint build check-kernels clean

demo:  ## install vLLM for this machine, serve a small trained MXFP4 model, ask it a word problem
	python="$$($(ENVIRONMENT) auto)" && "$$python" scripts/demo.py

test:  ## unit, layer and engine tests; layer tests also with the oldest and newest supported vLLM
	python="$$($(ENVIRONMENT) cpu --kernels)" && \
	PYTHON="$$python" bash tests/run_against_vllm.sh $(OLDEST_VLLM) && \
	PYTHON="$$python" bash tests/run_against_vllm.sh $(NEWEST_VLLM) && \
	"$$python" -m pytest tests

lint:  ## ruff and mypy
	python="$$($(ENVIRONMENT) cpu)" && \
	"$$python" -m ruff check . && "$$python" -m ruff format --check . && "$$python" -m mypy

build:  ## compile csrc into vllm_humming/_kernels.so, with nvcc from PyPI where the system has none
	python="$$($(ENVIRONMENT) auto)" && "$$python" build_tools/kernels.py --fetch-nvcc

check-kernels: build  ## no spills, no stack frames, no serialized wgmma in what was compiled
	python="$$($(ENVIRONMENT) auto)" && "$$python" build_tools/check_kernels.py

clean:  ## remove builds, environments and caches
	rm -rf .venv .cache .demo build dist *.egg-info vllm_humming/_kernels.so .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
