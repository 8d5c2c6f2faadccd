# make quickstart   a model learns sums on this machine, in about five minutes after the install
# make install      the virtual environment .venv alone
# make test         format, lint, types, and all tests
# make sglang-cpu   .venv-sglang, a real SGLang server for CPUs, which tests run against (2.4 GB)
.PHONY: help quickstart install check test sglang-cpu clean
PYTHON ?=
ARGS ?=
export PYTHON
# Set in many containers, it makes every process compile every library anew: seconds for each worker.
unexport PYTHONDONTWRITEBYTECODE

help:
	@sed -n 's/^# make/make/p' Makefile

quickstart:
	@scripts/install quickstart
	@.venv/bin/python scripts/quickstart.py $(ARGS)

install:
	@scripts/install dev

check: install
	@scripts/check

sglang-cpu:
	@scripts/sglang-cpu

test:
	@scripts/test

clean:
	rm -rf .venv .venv-sglang build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
