"""The checks and figures that want a GPU, by name, each with a time limit and a log: docs/benchmarks.md.

    python -m sglang_ext_bench on-gpu STEP [STEP ...] [--out FOLDER] [--model FOLDER]
    python -m sglang_ext_bench on-gpu --list

Steps run one after the other; those joined by + at once, which suits checks and nothing that is timed. What a step prints goes to
FOLDER/STEP.log, and its end to the screen; FOLDER/STEP.json holds its figures where it writes some, and FOLDER/STEP/ the logs of its
servers. One that fails or takes too long does not stop the next; the exit code is 1 then. Servers have the shapes of Qwen3-8B and random
weights, unless --model names others.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Lines of a log that are shown.
SHOWN = 30
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
# Graphs of prefills take half a minute and more of a server's start.
SHORT = "--disable-prefill-cuda-graph"
DUMMY = "--load-format dummy --skip-tokenizer-init --attention-backend flashinfer"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        command: words of a shell; ``{model}`` is the folder of shapes, ``{out}`` where figures go, without an ending.
        limit: seconds.
        gpus: that it needs.
    """

    command: str
    limit: int
    gpus: int = 1


def _long_server(batch: int) -> str:
    # With room for each request's prompt, answer and copy: where a prompt is evicted for copies, others wait until it is computed again.
    return (
        f"{DUMMY} --cuda-graph-bs {batch} --max-running-requests {batch} --mem-fraction-static 0.9 --chunked-prefill-size 8192 "
        f"--max-total-tokens {37500 * batch} --context-length 40000 {SHORT}"
    )


def _profile(more: str) -> str:
    return f"python -m sglang_ext_bench step-profile --model {{model}} --log {{out}}.server.log --server-arg='{_long_server(16)} {more}'"


def _longcot(batch: int, more: str = "", load: str = "32768:2048", length: str = "64,256") -> str:
    server = f"{_long_server(batch)}{more}"
    return (
        f"python -m sglang_ext_bench longcot --model {{model}} --mode lossy --load {batch}:{load} --output-len {length} "
        f"--logs {{out}} --json {{out}}.json --server-arg='{server}'"
    )


def _transfer(rate: int, tokens: str, methods: str = "lynx,int8") -> str:
    server = f"{DUMMY} --chunked-prefill-size 8192 --sleep-on-idle --context-length 140000 --cuda-graph-max-bs 8 {SHORT}"
    return (
        f"python -m sglang_ext_bench transfer --model {{model}} --method {methods} --link-gbps {rate} --context-len {tokens} --prompts 1 "
        "--repeats 2 --output-len 64 --draft-arg='--kv-bench-acceptance 0.99' --decode-arg='--base-gpu-id 1' "
        f"--logs {{out}} --json {{out}}.json --server-arg='{server}'"
    )


def _methods() -> str:
    # The pool has room for sixteen prompts of 30,000 tokens, their answers and the compressed KV of all of them.
    server = (
        "--attention-backend flashinfer --cuda-graph-bs 16 --max-running-requests 16 --mem-fraction-static 0.9 --context-length 32768 "
        f"--max-total-tokens 800000 --chunked-prefill-size 16384 {SHORT}"
    )
    return f"python -m sglang_ext_bench methods --model {{model}} --at-once 3 --json {{out}}.json --logs {{out}} --server-arg='{server}'"


def _tests(names: str) -> str:
    return f"python -m pytest -x -q -p no:cacheprovider {names}"


def _checks(names: str) -> str:
    return f"python tests/kernels/kernel_checks.py {names}"


def _jobs(link: int, rate: float, methods: str = "raw,hack4") -> str:
    server = f"{DUMMY} --chunked-prefill-size 8192 --sleep-on-idle --context-length 20000 {SHORT}"
    return (
        f"python -m sglang_ext_bench jobs --model {{model}} --method {methods} --rate {rate} --link-gbps {link} "
        f"--context-len 16384 --output-len 160 --jobs 16 --decode-arg='--base-gpu-id 1' --logs {{out}} --json {{out}}.json "
        f"--server-arg='{server}'"
    )


STEPS = {
    "choosing": Step(_checks("choosing quest"), 150),
    "lynx": Step(_checks("lynx"), 200),
    "rows": Step(_checks("hand_over coded_keys pointers"), 150),
    "prefill-checks": Step(_checks("prefill"), 120),
    "specialized-checks": Step(_checks("specialized_prefill"), 300),
    "integers": Step(_checks("integer_gluon integer_decode integer_switches packed_backend"), 150),
    "spade": Step(_tests("tests/gpu/test_gpu_spade.py"), 600),
    "quest": Step(_tests("tests/gpu/test_gpu_quest.py"), 400),
    "ranks": Step(_tests("tests/gpu/test_gpu_cache_ranks.py"), 600),
    "links": Step(_tests("tests/gpu/test_gpu_links.py"), 120),
    "link-rate": Step(
        "R='python -m sglang_ext_bench backend-rate --device cuda --dtype bfloat16 --layers 36 --heads 8 --dim 128 --mib 4608'; "
        "for codec in raw int8 exact; do $R --reference $codec --repeats 1 --stacks; done; $R --reference int8 --busy --stacks --repeats 1; "
        "$R --codec int8 --busy --stacks --repeats 1", 300,
    ),
    "prefill": Step("python -m sglang_ext_bench prefill-tiles --forms 4:64 4:128 --tiles specialized 64,4,3 128,8,2", 240),
    "attention": Step("python -m sglang_ext_bench attention --contexts 32768 --batch 8,16 --prefill 0 --bits 2 --json {out}.json", 240),
    "attention-128": Step(
        "python -m sglang_ext_bench attention --contexts 32768 --batch 8,16 --prefill 16384 --bits 4 --partition 64,128 --json {out}.json", 300,
    ),
    "attention-short": Step(
        "python -m sglang_ext_bench attention --contexts 2048,8192 --batch 8 --prefill 2048 --bits 4 --partition 32,64,128 --json {out}.json", 240,
    ),
    "packed-2": Step(
        "python -m sglang_ext_bench packed-kernel --methods hack:2 kivi:2 --batch 8 --kernels gluon --parts 11,1 13,1 15,1 16,1 17,1 20,1 31,2", 150,
    ),
    # With --model, a folder with weights and a tokenizer. Where the limit ends it, a second run measures the remaining servers.
    "methods": Step(_methods(), 580),
    "choices": Step("python -m sglang_ext_bench selection-speed --batch 16 --every 1 2 4 --priority 0 -1", 250),
    "choices-8": Step("python -m sglang_ext_bench selection-speed --batch 8 --every 1 2 4", 150),
    "sparse": Step("python -m sglang_ext_bench sparse-kernels", 100),
    "longcot": Step(_longcot(16) + " --method stock,spade --select-every 2,4", 450),
    "longcot-2k": Step(_longcot(16, load="2048:1024") + " --method stock,spade --select-every 2", 300),
    # What a step costs beside its choices.
    "longcot-rare": Step(_longcot(16) + " --method spade --select-every 1000", 250),
    "longcot-codes": Step(_longcot(16, " --kv-score-bits 8") + " --method spade --select-every 1,2", 400),
    "longcot-8": Step(_longcot(8) + " --method stock,spade --select-every 2,4,1", 600),
    "longcot-8-quest": Step(_longcot(8) + " --method stock,quest", 400),
    "longcot-stock": Step(_longcot(16, length="64,1024") + " --method stock", 450),
    "longcot-quest": Step(_longcot(16, length="64,1024") + " --method quest", 450),
    # Two GPUs that share a model, beside one that has a cache rank.
    "longcot-stock-tp2": Step(_longcot(16, " --tp-size 2", length="64,1024") + " --method stock", 450, 2),
    "longcot-quest-tp2": Step(_longcot(16, " --tp-size 2", length="64,1024") + " --method quest", 450, 2),
    "longcot-8-codes": Step(_longcot(8, " --kv-score-bits 8") + " --method spade --select-every 1,2", 400),
    # Up to 1,024 the span is that of stock and quest; full KV of all sixteen is at the rank after some 1,300 tokens.
    "longcot-ranks": Step(_longcot(16, length="64,1024,2048") + " --method spade-ranks --pack-layers auto", 350, 2),
    "longcot-ranks-regressed": Step(
        _longcot(16, length="64,1024,2048") + " --method spade-ranks --pack-layers auto --select-by regressed", 350, 2,
    ),
    "longcot-ranks-8": Step(_longcot(8) + " --method stock,spade-ranks --pack-layers auto", 400, 2),
    "longcot-ranks-2k": Step(
        _longcot(16, load="2048:1024", length="64,256,1024") + " --method stock,spade-ranks --pack-layers auto", 400, 2,
    ),
    # Where a step's time goes.
    "profile-stock": Step(_profile("--kv-mode full"), 200),
    "profile-quest": Step(_profile("--kv-mode lossy --kv-compressor quest --kv-select 2048 --page-size 16"), 200),
    "profile-spade": Step(_profile("--kv-mode lossy --kv-compressor spade --kv-select 2048 --kv-select-every 4"), 250),
    "profile-ranks": Step(_profile("--kv-mode lossy --kv-compressor spade --kv-select 2048 --kv-cache-ranks 1") + " --settle 8", 250, 2),
    "packs": Step("python -m sglang_ext_bench pack-cycles --json {out}.json", 450, 2),
    "transfer-25": Step(_transfer(25, "32768,131072"), 400, 2),
    # Against the pool's own bits, as --kv-reference exact has it, the default.
    "transfer-25-exact": Step(_transfer(25, "32768,131072", "lynx-exact,raw"), 500, 2),
    # With SGLang's default, by which a cached prefix leaves before the rest is computed.
    "transfer-25-early": Step(f"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=1 {_transfer(25, '32768,131072')}", 400, 2),
    "transfer-10": Step(_transfer(10, "131072"), 400, 2),
    "transfer-50": Step(_transfer(50, "32768"), 400, 2),
    # Nine tenths of what bf16 holds, as --rate auto found it.
    "jobs-10": Step(_jobs(10, 0.3), 300, 2),
    "jobs-forms": Step(_jobs(10, 0.3, "hack4:128,hack4:quantized,hack2"), 400, 2),
    "jobs-40": Step(_jobs(40, 0.66), 300, 2),
}  # fmt: skip


def run(name: str, options: argparse.Namespace) -> bool:
    """Run one step; whether it ended well."""
    step, log, begun = STEPS[name], options.out / f"{name}.log", time.monotonic()
    command = step.command.format(model=shlex.quote(str(options.model)), out=shlex.quote(str(options.out / name)))
    path = [str(ROOT), *(str(ROOT / "tests" / each) for each in ("kernels", "support")), os.environ.get("PYTHONPATH", "")]
    with log.open("w") as file:
        file.write(f"$ {command}\n")
        file.flush()
        process = subprocess.Popen(
            ["bash", "-c", command], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            # Threads of PyTorch on a CPU, or all cores spin beside what is timed.
            env={"OMP_NUM_THREADS": "8", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )  # fmt: skip
        try:
            ended = f"exit code {process.wait(step.limit)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after its limit of {step.limit} s"
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:])
    print(f"== {name}: {ended}, {time.monotonic() - begun:.0f} s\n{last}", flush=True)
    return ended == "exit code 0"


def shapes(folder: Path) -> Path:
    """A folder with what a server with random weights reads of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def main() -> None:
    """Run the steps that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="+ joins those that run at once")
    parser.add_argument("--list", action="store_true", help="print names, limits and commands, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("on-gpu"), help="of logs and figures (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="config.json of the shapes of servers (default: Qwen3-8B's)")
    options = parser.parse_args()
    if options.list:
        for name, step in STEPS.items():
            print(f"{name:16} {step.gpus} GPU{'s' * (step.gpus > 1)}, {step.limit} s: {step.command}")
        return
    groups = [group.split("+") for group in options.steps]
    unknown = sorted({name for group in groups for name in group} - set(STEPS))
    if unknown or not groups:
        parser.error((f"unknown steps {', '.join(unknown)}" if unknown else "no step is named") + "; --list tells which there are")
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    options.model = options.model.resolve() if options.model else shapes(options.out / "shapes")
    well = []
    for group in groups:
        with ThreadPoolExecutor(len(group)) as together:
            well += together.map(lambda name: run(name, options), group)
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
