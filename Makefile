# Each target does all of its own set-up, from a fresh clone, with nothing but Python 3.11 to 3.13, make and git.
# Variables: PYTHON=python3.12 (interpreter of .venv), SEED=123 (repeat a test run), VLLM=0.31 (release of test-e2e), ARGS="..." (passed on).

PY := .venv/bin/python
PYTEST := $(PY) -m pytest $(if $(SEED),--hypothesis-seed=$(SEED))
VLLM_PYTEST := .venv-vllm/bin/python -m pytest
# Tests side by side, where none starts engines. On two cores that takes two thirds of the time.
BESIDE := -n 2 --dist worksteal
# What CI also runs with these releases of vLLM, beside the installed one.
OTHER_RELEASES := 0.30.0 0.31.0 0.33.0
# Rows beside vLLM's own connector run where its environment is (`scripts/venv vllm` makes it), and say so where it is not.
BENCH_PY := $(if $(wildcard .venv-vllm/bin/python),.venv-vllm/bin/python,$(PY))
export PYTHON

# A run must not depend on what else lies on the caller's path.
unexport PYTHONPATH PYTHONHOME

.PHONY: help demo demo-vllm test test-ci test-e2e check soak reliability format bench mutants dist docs clean
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name what; \
	  do printf '  make %-11s  %s\n' "$$name" "$$what"; done

demo: ## Gemma-4 26B-A4B's cache, prefill TP 4 -> decode TP 8, one process per rank over NIXL, every byte checked
	@scripts/venv run
	@.venv/bin/kvreshard verify --model gemma-4-26b-a4b --prefill tp=4 --decode tp=8 $(ARGS)

demo-vllm: ## two real vLLM servers without a GPU, prefill TP 1 -> decode TP 2, beside an ordinary one (installs vLLM: 3 GB); KEEP=1 leaves them up
	@scripts/venv vllm
	@.venv-vllm/bin/python examples/vllm/demo.py $(if $(KEEP),--keep) $(ARGS)

test: ## the test suite; about six minutes on 2 cores
	@scripts/venv test
	@KVRESHARD_REQUIRE_NIXL=1 $(PYTEST) $(BESIDE) --hypothesis-profile=ci -m "not long" --ignore=tests/e2e --ignore=tests/vllm $(ARGS)

test-ci: ## what CI runs after `make test`: vLLM's own views and operators, a few pairs of real engines (installs vLLM: 3 GB)
	@scripts/venv vllm
	@.venv-vllm/bin/python -m tests.releases $(OTHER_RELEASES)
	@$(VLLM_PYTEST) $(BESIDE) tests/vllm $(ARGS)
	@for release in $(OTHER_RELEASES); do echo "== vLLM $$release"; \
	  PYTHONPATH="$$PWD/.vllm-$$release:$$PWD/src:$$PWD" $(VLLM_PYTEST) $(BESIDE) tests/vllm -m 'not one_release' $(ARGS) || exit 1; done
	@$(VLLM_PYTEST) tests/e2e -m e2e_ci $(ARGS)
	@$(VLLM_PYTEST) tests/unit/transport tests/soak -m long $(ARGS)
	@PYTHON=.venv-vllm/bin/python bench/gpu/run --rehearse
	@KVRESHARD_FUZZ_SECONDS=60 $(VLLM_PYTEST) tests/fuzz $(ARGS)
	@.venv-vllm/bin/python -m tests.faults.leaks --cycles 1000 $(if $(SEED),--seed $(SEED))
	@.venv-vllm/bin/python -m tests.soak --seconds 120 $(if $(SEED),--seed $(SEED))
	@.venv-vllm/bin/python -m tests.promtool
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory dist

test-e2e: ## every pair of real engines, here and with vLLM's own connector, and the table of it (an hour or two)
	@scripts/venv vllm
	@.venv-vllm/bin/python -m tests.releases $(if $(VLLM),$(VLLM))
	@KVRESHARD_VLLM=$(VLLM) $(VLLM_PYTEST) tests/e2e $(ARGS); status=$$?; .venv-vllm/bin/python -m tests.e2e.table --into docs/pairs.md; exit $$status

dist: ## wheel and sdist into dist/, each checked as a user would get it, with a bill of materials and the licences
	@scripts/venv run
	@$(PY) scripts/dist

docs: ## the documentation site into build/site; a broken link is an error
	@scripts/venv docs
	@$(PY) scripts/docs

soak: ## eight engines over NIXL, kills, stops, aborts, hostile clients, every byte checked: two minutes; BENCH=full for an hour
	@scripts/venv test
	@$(PY) -m tests.soak --seconds $(if $(filter full,$(BENCH)),3600,120) $(if $(SEED),--seed $(SEED)) $(ARGS)

reliability: ## every run behind docs/reliability.md that needs no vLLM, then its table; BENCH=full for an hour of soak
	@scripts/venv test
	@mkdir -p tests/results
	@KVRESHARD_RESULTS=tests/results/model.json $(PYTEST) -q --hypothesis-profile=ci tests/property/test_session.py
	@KVRESHARD_RESULTS=tests/results/session.json $(PYTEST) -q tests/unit/session
	@KVRESHARD_RESULTS=tests/results/hostile.json $(PYTEST) -q tests/faults/test_hostile_clients.py
	@KVRESHARD_RESULTS=tests/results/faults.json $(PYTEST) -q tests/faults/test_incast.py
	@$(PY) -m tests.fuzz.run --inputs 100000 > tests/results/fuzz.json
	@$(PY) -m bench.incast --json tests/results/incast.json
	@$(PY) -m tests.faults.leaks --json tests/results/leaks.json
	@$(PY) -m tests.soak --seconds $(if $(filter full,$(BENCH)),3600,120) --json tests/results/soak.json
	@$(PY) -m tests.reliability --into docs/reliability.md

check: ## format, lint, strict types, architecture, fast tests; before each commit
	@scripts/venv dev
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PYTEST) $(BESIDE) -q -m "not nixl and not slow" --ignore=tests/e2e --ignore=tests/vllm $(ARGS)

format: ## rewrite the sources the way `make check` wants them
	@scripts/venv dev
	@$(PY) -m ruff check --fix --exit-zero --quiet .
	@$(PY) -m ruff format .

bench: ## how fast, beside vLLM's own connector (where .venv-vllm is), with verdicts; BENCH=full for all of it
	@scripts/venv bench
	@OMP_NUM_THREADS=1 $(BENCH_PY) -m bench $(ARGS)
	@$(PY) -m bench.page
	@$(PY) -m bench.plots

mutants: ## break what matters most, some two dozen ways; every one must fail a test (a few minutes)
	@scripts/venv test
	@$(PY) -m tests.mutants $(ARGS)

clean: ## remove .venv, caches and builds
	rm -rf .venv .venv.lock .venv-vllm .venv-vllm.lock .vllm-* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
