"""Triton kernels, through Triton's interpreter, against plain PyTorch."""

import subprocess
import sys
from pathlib import Path

from check_names import CHECK_NAMES
from preloaded import run_script

CHECKS = Path(__file__).parents[2] / "kernels/kernel_checks.py"


def test_each_kernel_gives_what_pytorch_gives():
    # The interpreter is chosen as Triton is imported, so they need a process of their own.
    done = subprocess.run([sys.executable, str(CHECKS), *CHECK_NAMES], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == list(CHECK_NAMES)


def test_kernels_compile_for_a_gpu(preloaded, tmp_path):
    printed = run_script(preloaded, tmp_path / "printed", CHECKS.with_name("compile_checks.py"))
    expected = {
        *("packed_splits", "packed_splits_gluon", "merge_splits", "_splits", "scatter_kept", "pointer_splits", "write_kept_pointers"),
        *("pack_tiles", "_normalizers", "_means", "integer_splits", "_query_codes", "encode_tiles", "decode_tiles"),
        "integer_splits_gluon",
        *("count_bits", "write_rooms", "write_anchors", "read_rooms", "quantize_prompts", "prefill_tiles", "prefill_codes"),
        *("_compute_exact_logits", "_compute_quantized_logits", "_quantize_keys", "_bound_pages", "_choose_pages", "mark_top_tokens", "write_marked_tokens"),
        "_rotate_queries",
        *("_exchange", "_push_rows", "_commit_rows", "_move_newest"),
        *("_open_places", "_put_queries", "_put_keys", "_signal", "_signal_all", "_await", "_commit"),
        *("_pull_blocks", "_gather_rows", "_push_chosen", "_read_words", "_answer"),
    }
    assert expected <= set(printed.split())
