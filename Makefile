# Every target sets itself up from nothing but Python 3.10+; torch is pinned in constraints.txt.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := dev,report,onnx,serve,ray

.PHONY: demo test coverage check real slow bench clean help

help:
	@echo "make demo    train a small model on embedded images, detect what is strange, write a report (under a minute)"
	@echo "make test    the tests          make check   ruff and mypy --strict"
	@echo "make coverage    the tests, with branch coverage"
	@echo "make real    the tests that need real images and weights (NEURALMEAN_DATA, NEURALMEAN_WEIGHTS)"
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

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --cov --cov-branch --cov-report term:skip-covered

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

real: $(READY)
	$(BIN)/python -m pytest -m real -s tests

slow: $(READY)
	$(BIN)/python -m pytest -m slow tests

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist demo-output
