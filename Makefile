# Two commands on a fresh machine (Python 3.11+ and make): `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
WORKERS ?= 2
# conftest.py says which tests share a worker, and in which order they run
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test quick coverage lint unit docs bench accuracy weights clean

demo: $(STAMP)
	for gpu in h200_sxm a100_sxm l40s; do \
	    $(BIN)/kernelcast infer llama-3.1-8b --gpu $$gpu --batch 8 --input-len 2048 --output-len 256 || exit; echo; done

test: lint unit

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/lint-imports --no-cache

unit: $(DEV_STAMP)
	$(BIN)/python -m pytest $(SPREAD)

# For daily work: all but what is marked slow
quick: $(DEV_STAMP)
	$(BIN)/python -m pytest $(SPREAD) -m "not slow"

# Which lines tests run, and which not: a summary by file, and build/coverage/index.html
coverage: $(DEV_STAMP)
	$(BIN)/python -m pytest $(SPREAD) --cov --cov-report=term:skip-covered --cov-report=html

# The documentation as a site, in build/site
docs: $(DEV_STAMP)
	$(BIN)/mkdocs build --strict --site-dir build/site

# Accuracy of every predictor on measured tables (KERNELCAST_DATA names their folder), and of whole answers on published
# results -> docs/accuracy-kernels.md, docs/accuracy.md
accuracy: $(DEV_STAMP)
	$(BIN)/kernelcast evaluate -o .cache/accuracy --workers 2
	cp .cache/accuracy/accuracy.md docs/accuracy-kernels.md
	cp .cache/accuracy/*.png docs/
	$(BIN)/kernelcast evaluate public --fit --report docs/accuracy.md

# All weights again, by the recipes (src/kernelcast_lab/recipes), from KERNELCAST_DATA and our own measurements; all of
# them replace the shipped ones, or none. On a GPU where there is one; a run that was cut off goes on where it stopped.
FAMILIES := $(filter-out _%,$(basename $(notdir $(wildcard src/kernelcast_lab/recipes/*.toml))))
weights: $(DEV_STAMP)
	test -n "$$KERNELCAST_DATA" || { echo "KERNELCAST_DATA names the folder of measured tables"; exit 2; }
	$(BIN)/kernelcast fit --data "$$KERNELCAST_DATA" --data validation -o .cache/weights $(if $(VERSION),--version "$(VERSION)")
	for family in $(FAMILIES); do test -f .cache/weights/$$family.safetensors || { echo "no weights of $$family"; exit 1; }; done
	cp .cache/weights/*.safetensors .cache/weights/about.json src/kernelcast/forecast/weights/

bench: $(DEV_STAMP)
	$(BIN)/python benchmarks/predict_table.py

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("kernelcast needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# Fitting and tracing are tested with these releases; any PyTorch from 2.4 on will do. The models that we measured were
# those of this release of transformers: another may launch other kernels.
$(DEV_STAMP): $(STAMP) src/kernelcast_lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 torchvision==0.28.0 transformers==5.17.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs,plots,torch,diffusers,optuna,ray,web]' -e 'src/kernelcast_lab[published]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
