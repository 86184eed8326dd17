# Two commands: `make demo` shows it, `make test` proves it.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# Torch first and by its pin: a looser request pulls the CUDA libraries.
TORCH   = $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# A test runs in one thread, and as many tests at a time as there are processors; ranks that wait
# leave theirs to others.
# What one process has compiled, the next one reads.
PYTEST  = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n logical
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
MINUTES ?= 3

.PHONY: demo test check slow claims docs bench lock sbom audit clean
.DEFAULT_GOAL := demo

$(VENV)/run.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch ..."
	@$(PIP) "$(TORCH)"
	@echo "installing shoal-ml ..."
	@$(PIP) -c constraints.txt -e '.[run]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing what the tests need ..."
	@$(PIP) -c constraints.txt -e '.[run,cluster,fields,bench,docs,dev]'
	@touch $@

demo: $(VENV)/run.stamp  ## probe, plan, train, lose a rank, resume, generate, serve, gallery
	$(BIN)/shoal demo --dir demo --minutes $(MINUTES)

test: $(VENV)/dev.stamp  ## the quick tests
	$(PYTEST) -m "not slow and not soak and not claim and not gpu"

slow: $(VENV)/dev.stamp  ## the tests that `make test` leaves out
	$(PYTEST) -m "slow and not soak and not claim and not gpu"

check: $(VENV)/dev.stamp  ## format, lint, types, floors, spelling, docs
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

claims: $(VENV)/dev.stamp  ## every claim in full, into results/
	$(BIN)/shoal claims run --all

docs: $(VENV)/dev.stamp  ## the documentation site, offline
	$(BIN)/mkdocs build --strict

bench: $(VENV)/dev.stamp  ## ratios against named peers, into results/
	$(BIN)/python benchmarks/training.py

lock:  ## pins and hashes of requirements/, from constraints.txt; needs uv
	scripts/lock

sbom: $(VENV)/dev.stamp  ## what it is made of: dist/sbom.json and docs/licenses.md
	$(BIN)/python scripts/sbom

# Fails where a package cannot be looked up: an audit without advisories is none.
audit: $(VENV)/dev.stamp  ## known vulnerabilities of what requirements/ pins; needs the network
	@$(PIP) -c constraints.txt -e '.[audit]'
	$(BIN)/pip-audit --strict --disable-pip --require-hashes -r requirements/run.txt -r requirements/cuda.txt

clean:
	rm -rf $(VENV) demo site dist build
