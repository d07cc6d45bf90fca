"""Runs named checks and measurements that need a GPU, each with a time limit and a log.

    sglang-ext-bench on-gpu --list
    sglang-ext-bench on-gpu spade+quest attention --out on-gpu

Steps run one after another. Steps that are joined by + run at once, which suits checks but no measurements. Printed lines of a
step go to STEP.log in the folder of --out. Figures go to STEP.json, and logs of servers to the folder STEP. At the end of a step, its
exit code, its seconds and the last lines of its log are printed.

A step that fails or reaches its time limit does not stop the next one; the exit code is then 1. Servers have the shapes of Qwen3-8B and
random weights, unless --model is passed. The command needs a checkout of the repository, because steps run its tests.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.tools import CommandError

ROOT = Path(__file__).parents[2]
"""Root of the repository, in which steps run."""
SEARCHED = (".", "benchmarks", "tests/kernels", "tests/support")
"""Folders in which steps find modules."""
DEFAULT_OUT = Path("on-gpu")
# Last lines of a log that are printed.
PRINTED_LINES = 30
# Seconds that a step has to end after its time limit.
GRACE = 10.0
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
# Capturing CUDA graphs of prefills takes half a minute or more of a server's start.
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
DUMMY = "--load-format dummy --skip-tokenizer-init --attention-backend flashinfer"
# Prompts of real text: code of Python's standard library.
CODE_TEXT = "cat $(python -c 'import sysconfig; print(sysconfig.get_paths()[\"stdlib\"])')/*.py > {out}.txt"


@dataclass(frozen=True)
class Step:
    """A check or a measurement.

    Attributes:
        command: Command line for bash. ``{model}`` is the model folder, ``{out}`` the path of its outputs, without a suffix.
        limit: Time limit, in seconds.
        gpus: Number of GPUs that it needs.
    """

    command: str
    limit: int
    gpus: int = 1


def _long_server_flags(batch: int) -> str:
    # The pool has room for the prompt, output and compressed KV of each request. Otherwise prompts are evicted and computed again.
    return (
        f"{DUMMY} --cuda-graph-bs {batch} --max-running-requests {batch} --mem-fraction-static 0.9 --chunked-prefill-size 8192 "
        f"--max-total-tokens {37500 * batch} --context-length 40000 {NO_PREFILL_GRAPHS}"
    )


def _step_profile(more: str) -> str:
    return f"python -m sglang_ext_bench step-profile --model {{model}} --log {{out}}.server.log --server-arg='{_long_server_flags(16)} {more}'"


def _longcot(batch: int, more: str = "", load: str = "32768:2048", length: str = "64,256") -> str:
    server = f"{_long_server_flags(batch)}{more}"
    return (
        f"python -m sglang_ext_bench longcot --model {{model}} --mode lossy --load {batch}:{load} --output-len {length} "
        f"--logs {{out}} --json {{out}}.json --server-arg='{server}'"
    )


def _transfer(rate: int, tokens: str, methods: str = "lynx,int8") -> str:
    server = f"{DUMMY} --chunked-prefill-size 8192 --sleep-on-idle --context-length 140000 --cuda-graph-max-bs 8 {NO_PREFILL_GRAPHS}"
    return (
        f"python -m sglang_ext_bench transfer --model {{model}} --method {methods} --link-gbps {rate} --context-len {tokens} --prompts 1 "
        "--repeats 2 --output-len 64 --draft-arg='--kv-bench-acceptance 0.99' --decode-arg='--base-gpu-id 1' "
        f"--logs {{out}} --json {{out}}.json --server-arg='{server}'"
    )


def _methods() -> str:
    # The pool has room for sixteen prompts of 30,000 tokens, their outputs and their compressed KV.
    server = (
        "--attention-backend flashinfer --cuda-graph-bs 16 --max-running-requests 16 --mem-fraction-static 0.9 --context-length 32768 "
        f"--max-total-tokens 800000 --chunked-prefill-size 16384 {NO_PREFILL_GRAPHS}"
    )
    return f"python -m sglang_ext_bench methods --model {{model}} --at-once 3 --json {{out}}.json --logs {{out}} --server-arg='{server}'"


def _auto() -> str:
    server = (
        "--attention-backend flashinfer --mem-fraction-static 0.9 --context-length 32768 --max-total-tokens 1300000 "
        f"--chunked-prefill-size 16384 {NO_PREFILL_GRAPHS}"
    )
    return (
        f"{CODE_TEXT}; python -m sglang_ext_bench auto-cells --model {{model}} --prompt-file {{out}}.txt --arms stock,auto,15 --output-len 512 "
        f"--logs {{out}} --json {{out}}.json --server-arg='{server}'"
    )


def _on_stores(command: str, memory_gb: int) -> str:
    """Run a command of the package on a folder in memory and on a store process."""
    return (
        f"F=$(mktemp -d -p /dev/shm); python -m sglang_ext.store serve --listen tcp://127.0.0.1:7100 --memory-gb {memory_gb} & S=$!; "
        "trap 'kill $S; rm -rf $F' EXIT; sleep 5; "
        f"python -m sglang_ext_bench {command} --store file:$F --store tcp://127.0.0.1:7100 --json {{out}}.json"
    )


def _prefix_store(prompts: str, model_flags: str) -> str:
    # Two servers run at once, and share the GPU.
    server = f"{model_flags} --mem-fraction-static 0.4 --max-total-tokens 40000 --chunked-prefill-size 8192 {NO_PREFILL_GRAPHS}"
    return _on_stores(
        f"prefix-store --model {{model}} {prompts} --prompts 3 --short-prompts 0 --greedy-only --host-gb 12 --dtype bfloat16 --logs {{out}} "
        f"--server-arg='{server}'", 20,
    )  # fmt: skip


def _tests(names: str) -> str:
    return f"python -m pytest -x -q -p no:cacheprovider {names}"


def _checks(names: str) -> str:
    return f"python tests/kernels/kernel_checks.py {names}"


def _jobs(link: int, rate: float, methods: str = "raw,hack4") -> str:
    server = f"{DUMMY} --chunked-prefill-size 8192 --sleep-on-idle --context-length 20000 {NO_PREFILL_GRAPHS}"
    return (
        f"python -m sglang_ext_bench jobs --model {{model}} --method {methods} --rate {rate} --link-gbps {link} "
        f"--context-len 16384 --output-len 160 --jobs 16 --decode-arg='--base-gpu-id 1' --logs {{out}} --json {{out}}.json "
        f"--server-arg='{server}'"
    )


STEPS: dict[str, Step] = {
    "choosing": Step(_checks("choosing quest"), 150),
    "lynx": Step(_checks("lynx"), 200),
    "rows": Step(_checks("hand_over coded_keys pointers"), 150),
    "prefill-checks": Step(_checks("prefill"), 120),
    "specialized-checks": Step(_checks("specialized_prefill"), 300),
    "integers": Step(_checks("integer_gluon integer_decode packed_backend"), 150),
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
    # Pass a folder with weights and a tokenizer as --model. After the time limit, a second run measures the remaining servers.
    "methods": Step(_methods(), 580),
    # The KV of 32,768 tokens of Qwen3-8B.
    "store-rate": Step(_on_stores("store-rate --pages 512", 8), 200),
    "prefix-store": Step(_prefix_store("--context-len 32768", f"{DUMMY} --context-length 40000"), 580),
    # The same folder. A second run measures the arms that are missing.
    "auto": Step(_auto(), 580),
    # With a folder of weights.
    "prefix-store-text": Step(
        f"{CODE_TEXT}; {_prefix_store('--context-len 30000 --prompt-file {out}.txt', '--attention-backend flashinfer')}", 580,
    ),
    "choices": Step("python -m sglang_ext_bench selection-speed --batch 16 --every 1 2 4 --priority 0 -1", 250),
    "choices-8": Step("python -m sglang_ext_bench selection-speed --batch 8 --every 1 2 4", 150),
    "sparse": Step("python -m sglang_ext_bench sparse-kernels", 100),
    "longcot": Step(_longcot(16) + " --method stock,spade --select-every 2,4", 450),
    "longcot-2k": Step(_longcot(16, load="2048:1024") + " --method stock,spade --select-every 2", 300),
    # The time of a step without its selections.
    "longcot-rare": Step(_longcot(16) + " --method spade --select-every 1000", 250),
    "longcot-codes": Step(_longcot(16, " --kv-score-bits 8") + " --method spade --select-every 1,2", 400),
    "longcot-8": Step(_longcot(8) + " --method stock,spade --select-every 2,4,1", 600),
    "longcot-8-quest": Step(_longcot(8) + " --method stock,quest", 400),
    "longcot-stock": Step(_longcot(16, length="64,1024") + " --method stock", 450),
    "longcot-quest": Step(_longcot(16, length="64,1024") + " --method quest", 450),
    # Two GPUs with tensor parallelism, to compare with one GPU and a cache rank.
    "longcot-stock-tp2": Step(_longcot(16, " --tp-size 2", length="64,1024") + " --method stock", 450, 2),
    "longcot-quest-tp2": Step(_longcot(16, " --tp-size 2", length="64,1024") + " --method quest", 450, 2),
    "longcot-8-codes": Step(_longcot(8, " --kv-score-bits 8") + " --method spade --select-every 1,2", 400),
    # Up to 1,024 tokens, to compare with stock and quest. After about 1,300 tokens, the rank holds the full KV of all requests.
    "longcot-ranks": Step(_longcot(16, length="64,1024,2048") + " --method spade-ranks --pack-layers auto", 350, 2),
    "longcot-ranks-regressed": Step(
        _longcot(16, length="64,1024,2048") + " --method spade-ranks --pack-layers auto --select-by regressed", 350, 2,
    ),
    "longcot-ranks-8": Step(_longcot(8) + " --method stock,spade-ranks --pack-layers auto", 400, 2),
    "longcot-ranks-2k": Step(
        _longcot(16, load="2048:1024", length="64,256,1024") + " --method stock,spade-ranks --pack-layers auto", 400, 2,
    ),
    # Kernels and gaps of a step.
    "profile-stock": Step(_step_profile("--kv-mode full"), 200),
    "profile-quest": Step(_step_profile("--kv-mode lossy --kv-compressor quest --kv-select 2048 --page-size 16"), 200),
    "profile-spade": Step(_step_profile("--kv-mode lossy --kv-compressor spade --kv-select 2048 --kv-select-every 4"), 250),
    "profile-ranks": Step(_step_profile("--kv-mode lossy --kv-compressor spade --kv-select 2048 --kv-cache-ranks 1") + " --settle 8", 250, 2),
    "packs": Step("python -m sglang_ext_bench pack-cycles --json {out}.json", 450, 2),
    "transfer-25": Step(_transfer(25, "32768,131072"), 400, 2),
    # Compared with --kv-reference exact, the default.
    "transfer-25-exact": Step(_transfer(25, "32768,131072", "lynx-exact,raw"), 500, 2),
    # With SGLang's default: a cached prefix is sent before the other tokens are computed.
    "transfer-25-early": Step(f"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=1 {_transfer(25, '32768,131072')}", 400, 2),
    "transfer-10": Step(_transfer(10, "131072"), 400, 2),
    "transfer-50": Step(_transfer(50, "32768"), 400, 2),
    # Nine tenths of the rate that bf16 sustains, which --rate auto found.
    "jobs-10": Step(_jobs(10, 0.3), 300, 2),
    "jobs-forms": Step(_jobs(10, 0.3, "hack4:128,hack4:quantized,hack2"), 400, 2),
    "jobs-40": Step(_jobs(40, 0.66), 300, 2),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("steps", nargs="*", metavar="STEP", help="name of a step; + joins steps that run at once")
    add("--list", action="store_true", help="print the names, GPUs, time limits and commands of all steps, and run nothing")
    # No default, because the folder of a default would be created for --list, too.
    add("--out", type=Path, metavar="FOLDER", help=f"folder for logs and figures (default: {DEFAULT_OUT})")
    add("--model", type=Path, metavar="FOLDER", help="model of the servers; a config.json is enough for most steps (default: Qwen3-8B shapes)")


def run(args: argparse.Namespace, steps: Mapping[str, Step] = STEPS) -> int:
    """Run the steps of the command line. Returns 0 if all succeeded, else 1."""
    if args.list:
        for name, step in steps.items():
            print(f"{name:16} {step.gpus} GPU{'s' * (step.gpus > 1)}, {step.limit} s: {step.command}")
        return 0
    groups = [group.split("+") for group in args.steps]
    unknown = sorted({name for group in groups for name in group} - set(steps))
    if unknown:
        raise CommandError(f"unknown steps {', '.join(unknown)}: pass some of {', '.join(steps)}; --list prints their commands")
    if not groups:
        raise CommandError("no step is named: pass STEP, or --list for all names")
    if not (ROOT / "tests").is_dir():
        raise CommandError(f"{ROOT} is no checkout of the repository, which steps run in: run the command from an editable installation of one")
    out = (args.out or DEFAULT_OUT).resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = args.model.resolve() if args.model else make_model_folder(out / "shapes")
    succeeded: list[bool] = []
    for group in groups:
        with ThreadPoolExecutor(len(group)) as pool:
            succeeded += pool.map(lambda name: run_step(name, steps[name], model, out), group)
    return 0 if all(succeeded) else 1


def run_step(name: str, step: Step, model: Path, out: Path) -> bool:
    """Run a step with a model folder, and print its end and the last lines of its log, in the folder ``out``. Returns whether it succeeded."""
    log, started = out / f"{name}.log", time.monotonic()
    command = step.command.format(model=shlex.quote(str(model)), out=shlex.quote(str(out / name)))
    with log.open("w") as file:
        file.write(f"$ {command}\n")
        file.flush()
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env=step_environment(),
        )
        try:
            ended = f"exit code {process.wait(step.limit)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after its limit of {step.limit} s"
            _stop_group(process)
    last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-PRINTED_LINES:])
    print(f"== {name}: {ended}, {time.monotonic() - started:.0f} s\n{last_lines}", flush=True)
    return ended == "exit code 0"


def step_environment() -> dict[str, str]:
    """Environment variables of a step, in which ``python`` is the interpreter of this process.

    Without a limit, PyTorch's CPU threads use all cores and disturb measurements.
    """
    modules = [str(ROOT / folder) for folder in SEARCHED] + [os.environ.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    paths = {"PYTHONPATH": modules, "PATH": programs}
    return {"OMP_NUM_THREADS": "8", **os.environ, **{name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()}}


def _stop_group(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and all processes that it started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def make_model_folder(folder: Path) -> Path:
    """Write the config.json of Qwen3-8B to a folder, for servers with random weights. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
