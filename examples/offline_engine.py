"""Verified decoding without a server: ``sgl.Engine`` takes the flags as arguments.

make install
.venv/bin/python -m sglang_ext_bench.demo_model           # prepares the demo model, once
.venv/bin/python examples/offline_engine.py [MODEL]
"""

import inspect
import sys
import textwrap
from pathlib import Path

import sglang as sgl

DEMO_MODEL = ".cache/models/SmolLM2-135M-Instruct"


def main(model: str = DEMO_MODEL) -> None:
    """Complete some hundred tokens of source code: drafting starts at 128 tokens of context."""
    if model == DEMO_MODEL and not Path(model).is_dir():
        sys.exit(f"there is no {model} here: run `.venv/bin/python -m sglang_ext_bench.demo_model` in the repository's root, or pass a model")
    # A small pool: the two requests and their compressed KV need some 2,000 tokens.
    # A fixed draft length: on a CPU, where drafting does not pay, `auto` would show little of it.
    flags = {"kv_mode": "verified", "kv_budget": 0.5, "kv_draft_length": 8, "max_total_tokens": 8192}
    engine = sgl.Engine(model_path=model, log_level="error", **flags)
    try:
        prompts = [inspect.getsource(textwrap)[:2000], inspect.getsource(inspect)[:2000]]
        for output in engine.generate(prompts, {"temperature": 0, "max_new_tokens": 48}):
            print(output["text"])
            print({k: v for k, v in output["meta_info"].items() if k.startswith("kv_")})
    finally:
        engine.shutdown()


# SGLang starts its processes by importing this file again.
if __name__ == "__main__":
    main(*sys.argv[1:2])
