"""Host memory that a container or a service leaves is asked for before weights are loaded."""

from types import SimpleNamespace

import psutil
import pytest
from argument_helpers import arguments
from sglang.srt.configs.model_config import ModelConfig
from transformers import Qwen3Config

from sglang_ext import flag_checks
from sglang_ext.config.options import ranks_per_host
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.host_tier import host_memory
from sglang_ext.mem_cache.host_tier.host_memory import AvailableMemory

GB = 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """One with 100 GB left."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GB))


def groups(folder, lines, files):
    """A tree of control groups: ``lines`` of /proc/self/cgroup, and of each file its text."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    own = folder / "own"
    own.write_text("".join(f"{line}\n" for line in lines))
    return AvailableMemory.find(folder, own)


SECOND = {"a/b/memory.max": 8 * GB, "a/b/memory.current": 5 * GB}
FIRST = {"memory/a/memory.limit_in_bytes": 8 * GB, "memory/a/memory.usage_in_bytes": 5 * GB}


@pytest.mark.parametrize(
    ("files", "available", "limit"),
    [
        (SECOND, 3, "a/b/memory.max"),
        (SECOND | {"a/b/memory.stat": f"anon 7\ninactive_file {GB}\nactive_file {GB}\nfile {4 * GB}"}, 5, "a/b/memory.max"),
        (SECOND | {"a/b/memory.high": 6 * GB}, 1, "a/b/memory.high"),
        (SECOND | {"a/b/memory.max": "max", "a/b/memory.high": "max"}, 100, "this machine"),
        (SECOND | {"a/b/memory.current": 9 * GB}, 0, "a/b/memory.max"),
        (SECOND | {"a/memory.max": 7 * GB, "a/memory.current": 6 * GB}, 1, "a/memory.max"),
        (SECOND | {"memory.max": 7 * GB, "memory.current": 5 * GB}, 2, "memory.max"),
        (SECOND | {"a/b/memory.max": 500 * GB}, 100, "this machine"),
        ({f"unified/{name}": text for name, text in SECOND.items()}, 3, "unified/a/b/memory.max"),
        ({}, 100, "this machine"),
    ],
    ids=["limit", "file cache", "high", "none", "beyond", "around", "root", "more than there is", "beside version 1", "no files"],
)
def test_the_least_of_all_limits_of_version_2_is_what_may_be_taken(tmp_path, files, available, limit):
    found = groups(tmp_path, ["0::/a/b"], files)
    assert found.available == available * GB and limit in found.limit


@pytest.mark.parametrize(
    ("path", "files", "available"),
    [
        ("/a", FIRST, 3),
        ("/a/c", FIRST, 3),
        ("/a", FIRST | {"memory/a/memory.stat": f"active_file {3 * GB}\ntotal_active_file {GB}"}, 4),
        ("/a", FIRST | {"memory/a/memory.limit_in_bytes": 9223372036854771712}, 100),
        ("/seen/from/outside", {name.replace("/a/", "/"): text for name, text in FIRST.items()}, 3),
    ],
    ids=["limit", "around", "file cache", "none", "container"],
)
def test_limits_of_version_1_hold_too(tmp_path, path, files, available):
    assert groups(tmp_path, ["3:cpuset:/x", f"4:memory:{path}", "0::/"], files).available == available * GB


def test_a_system_without_control_groups_has_what_the_machine_has(tmp_path):
    assert AvailableMemory.find(tmp_path, tmp_path / "none").available == 100 * GB


def test_what_cannot_be_had_is_refused_in_one_line_with_limit_and_remedy(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GB))
    host_memory.check(10 * GB)
    host_memory.check(5 * GB, ranks=2)
    with pytest.raises(OptionError, match=r"asks for 11.0 GB .*; 10.0 GB are available \(all that this machine has left\): pass at most 10.0"):
        host_memory.check(11 * GB)
    with pytest.raises(OptionError, match="asks for 4.0 GB .* each of 3 ranks, 12.0 GB together.*pass at most 3.3") as refused:
        host_memory.check(4 * GB, ranks=3)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("ranks", "hosts", "here"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (3, 2, 2)])
def test_flags_are_checked_for_all_ranks_of_this_host(tmp_path, ranks, hosts, here):
    Qwen3Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=16, max_position_embeddings=2048,
        torch_dtype="float32", architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    args = arguments(
        kv_host_gb=100 / here + 1, tp_size=ranks, nnodes=hosts, page_size=1, chunked_prefill_size=2048, device="cpu",
        model_path=str(tmp_path), attention_backend="torch_native",
        cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="disabled"), decode=SimpleNamespace(backend="disabled")),
    )  # fmt: skip
    model = ModelConfig(str(tmp_path))
    args.get_model_config = lambda: model
    assert ranks_per_host(args) == here
    with pytest.raises(OptionError, match="--kv-host-gb asks for"):
        flag_checks.check_resolved(args)
    for fits in (0, 100 / here - 1):
        args.kv_host_gb = fits
        flag_checks.check_resolved(args)
