# make up      start the whole system (ARGS="--http-port 9000 --engine mock": arguments of `kvbus up`)
# make test    make check, then all tests, JOBS=3 at a time, 0: in one process (PYTEST_ARGS="-k router")
# make check   formatting, lint, types, import rules
# make chaos   200 disaggregated requests while workers are killed and links are cut (KVBUS_CHAOS_SEED=7: which points)
# make fmt     format, and fix what can be fixed
# make agents   real coding agents against the whole system (CLIENTS="claude-code codex"; needs npm)
# make bench   how long services take to start and what they cost when idle
# make bench-prefix-stability   what a line that changes at the top of a long prompt costs, and that stripping it helps
# make bench-resume   the first token of a session that was idle while others needed the memory, by where its blocks lie
# make bench-index   storing, matching and memory of the prefix index
# make bench-kvbm    onboarding from host memory and disk against plain copies and reads, and what write-through costs
# make bench-router   what a placement costs, and how evenly several routers spread requests
# make bench-frontend   what tokenizing and keying a long prompt costs against plain HF tokenizing, and parsing a token
# make bench-transfer   reading KV blocks from another process by each backend, beside memcpy, a socket, NIXL and UCX alone
# make clean   remove the environment and all caches in this folder

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 3
CLIENTS ?=
export VENV PYTHON TORCH

BIN = $(abspath $(VENV))/bin

.PHONY: help up test check chaos fmt agents bench bench-frontend bench-index bench-kvbm bench-router bench-prefix-stability bench-resume bench-transfer clean run-env dev-env

help:
	@sed -n 's/^# //p' Makefile

run-env:
	@scripts/bootstrap.sh run

dev-env:
	@scripts/bootstrap.sh dev

up: run-env
	@exec $(BIN)/kvbus up $(ARGS)

check: dev-env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases tests libs/*/tests
	MYPYPATH=examples/bandit-policy $(BIN)/mypy --explicit-package-bases examples/bandit-policy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

chaos: dev-env
	KVBUS_CHAOS_REQUESTS=200 $(BIN)/pytest -s tests/fault/disaggregation/test_chaos.py $(PYTEST_ARGS)

fmt: dev-env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

agents: dev-env
	@$(BIN)/python -m tests.agents $(CLIENTS)

bench: run-env
	@exec $(BIN)/kvbus bench startup $(ARGS)

bench-prefix-stability: run-env
	@exec $(BIN)/kvbus bench prefix-stability $(ARGS)

bench-resume: run-env
	@exec $(BIN)/kvbus bench resume $(ARGS)

bench-index: run-env
	@exec $(BIN)/kvbus bench index $(ARGS)

bench-kvbm: run-env
	@exec $(BIN)/kvbus bench kvbm $(ARGS)

bench-router: run-env
	@exec $(BIN)/kvbus bench router $(ARGS)

bench-frontend: run-env
	@$(BIN)/kvbus model get smollm2 >/dev/null
	@exec $(BIN)/kvbus bench frontend $(ARGS)

bench-transfer: run-env
	@exec $(BIN)/kvbus bench transfer $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
	find libs services tests -name __pycache__ -type d -prune -exec rm -rf {} +
