"""The checks of the doctor: the installation, the device, attention backends, hooks, the model, kernels and cache ranks."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import zmq

from sglang_ext import serve_pd
from sglang_ext.config import disaggregation_options, model_folder, model_options, options
from sglang_ext.core import OptionError
from sglang_ext.hooks.activation import find_problem, is_patched_fork
from sglang_ext.hooks.table import Hook, PrivateName
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer
from sglang_ext.managers.cache_rank.protocol import VERSION, Attach, BufferShape, RotaryParameters
from sglang_ext.managers.cache_rank.rank_link import START_SECONDS, RankLink
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.prefix_store.backend import StoreBackend, StoreError, open_backend
from sglang_ext.mem_cache.prefix_store.object_header import ObjectError
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object, read_page

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

logger = logging.getLogger(__name__)

INSTALL = "run `make install`, or `pip install -e .` in the environment that serves"
PYTHON_VERSIONS = ((3, 11), (3, 12))
STORE_PAGES = 16
"""Pages of 2 MB that the check of a prefix store writes."""
PLUGIN = "sglang.srt.plugins", "sglang_ext.plugin:register"
PLATFORM = "sglang.srt.platforms", "sglang_ext.platforms:activate"
CACHE_RANKS, PREFIX_STORE = "cache ranks", "prefix store"
OPTIONAL = CACHE_RANKS, PREFIX_STORE
"""Checks of what no ``--kv-mode`` needs."""
RANKS_REMEDY = (
    "allow this user to start processes, to create anonymous memory (memfd_create) and sockets in TMPDIR; or serve without "
    "--kv-cache-ranks: tokens are then selected between steps, on a GPU on a second stream"
)


@dataclass(frozen=True)
class Check:
    """One line of the report. ``ok``: sglang-ext can serve with what was found. ``remedy``: what to do if not, else empty."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def make_check(name: str, ok: bool, found: str, remedy: str) -> Check:
    """Create a check that shows its remedy only if it fails."""
    return Check(name, ok, found, "" if ok else remedy)


def one_line(error: Exception) -> str:
    """An error in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def check_python(running: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Check that SGLang's packages are pinned for this Python."""
    supported = [".".join(map(str, version)) for version in PYTHON_VERSIONS]
    remedy = f"make the environment with Python {' or '.join(supported)}: `make install PYTHON=python3.11`"
    return make_check("Python", running in PYTHON_VERSIONS, ".".join(map(str, running)), remedy)


def package_version(package: str) -> str | None:
    """Version of an installed package. None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_package(name: str, found: str | None, required: str | None = None) -> Check:
    """Check that a package is installed. ``required``: the version that the hooks were written for. None: SGLang's requirements determine it."""
    remedy = f"install {name.lower()}=={required}: `make install`" if required else INSTALL
    return make_check(name, found is not None and required in (None, found), found or "not installed", remedy)


def check_entry_point(name: str, group: str, value: str) -> Check:
    """Check that SGLang finds one of our entry points."""
    known = entry_names(group, value)
    return make_check(name, bool(known), f"{known[0]} in {group}" if known else f"not in {group}", INSTALL)


def entry_names(group: str, value: str) -> list[str]:
    """Names of the installed entry points of a group that load ``value``."""
    return [point.name for point in entry_points(group=group) if point.value == value]


def check_not_filtered() -> Check:
    """Check that SGLang's environment variables allow it to load the plugin."""
    asked = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if asked and not asked & {*entry_names(*PLUGIN)}:
        found = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves it out"
        return Check("plugin selection", False, found, "add sglang_ext to SGLANG_PLUGINS, or unset it")
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform and platform not in entry_names(*PLATFORM):
        found = f"SGLANG_PLATFORM={platform} leaves it out"
        return Check("plugin selection", False, found, "unset SGLANG_PLATFORM")
    return Check("plugin selection", True, "SGLang loads it")


def check_device() -> Check:
    """Check the device that SGLang would use: an NVIDIA GPU, or the plain CPU platform."""
    from sglang.srt.platforms import current_platform

    from sglang_ext.platforms.plain_cpu import PlainCpuPlatform

    if isinstance(current_platform, PlainCpuPlatform):
        threads = torch.get_num_threads()
        return Check("device", True, f"plain CPU, {threads} thread{'s' * (threads > 1)}")
    if torch.version.cuda is not None and torch.cuda.is_available():
        return Check("device", True, f"CUDA: {torch.cuda.get_device_name()}")
    found = f"SGLang's {type(current_platform).__name__}"
    remedy = (
        "use an NVIDIA GPU, or a CPU with SGLANG_PLUGINS, SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE "
        "unset; other accelerators serve with --kv-mode full"
    )
    return Check("device", False, found, remedy)


def check_attention_backends() -> Check:
    """Check which attention backends that read compressed KV are installed."""
    # torch_native and triton are part of SGLang. flashinfer is a separate package. fa3 is a part of SGLang's kernels that is compiled for
    # some GPUs.
    on_gpu = torch.cuda.is_available()
    missing = {"flashinfer": not find_spec("flashinfer"), "triton": not on_gpu, "fa3": not (on_gpu and has_fa3())}
    there = [name for name in options.ATTENTION_BACKENDS if not missing.get(name)]
    needed = "flashinfer" if on_gpu else "torch_native"
    remedy = "install flashinfer (`make install`), or pass --attention-backend triton"
    return make_check("attention backends", needed in there, ", ".join(there), remedy)


def has_fa3() -> bool:
    """Whether SGLang's kernels contain FlashAttention-3. They are not loaded for this check."""
    spec = find_spec("sgl_kernel")
    return spec is not None and any(any(Path(folder).glob("flash_ops*")) for folder in spec.submodule_search_locations)


def check_transfer() -> Check:
    """Check which transfer backends (``--disaggregation-transfer-backend``) work, and whether links can be encrypted."""
    keys = "encrypted with --kv-link-keys" if zmq.has("curve") else "not encrypted: this libzmq has no CURVE"
    obstacles = {name: disaggregation_options.transport_obstacle(name) for name in disaggregation_options.TRANSPORTS}
    found = [f"{options.BACKEND} (ZMQ {zmq.zmq_version()}, {keys})", *(name for name, why in obstacles.items() if why is None)]
    # Of SGLang's own backends, the one that any machine could have.
    lacking = obstacles[disaggregation_options.MOONCAKE_TCP]
    return Check("KV transfer", True, ", ".join(found) + (f"; not {disaggregation_options.MOONCAKE_TCP}: {lacking}" if lacking else ""))


def check_router() -> Check:
    """Check that SGLang's router is installed. serve_pd starts it for a prefill and a decode server. A single server needs none."""
    # Looked up as in serve_pd, because the package and the module have different names.
    there = find_spec(serve_pd.ROUTER) is not None
    return Check("router", True, serve_pd.ROUTER if there else f"none, which serve_pd needs: {serve_pd.INSTALL_ROUTER}")


def check_hooks(table: Sequence[Hook | PrivateName], sglang: str) -> Iterator[Check]:
    """Yield one line for all hooks and private names, and one for each that does not match. ``sglang`` is the version that they match."""
    problems = {entry.target: find_problem(entry) for entry in table}
    remedy = f"install sglang=={sglang}, or serve with --kv-mode full"
    fitting = sum(problem is None for problem in problems.values())
    caller = ", called by this patched fork" if is_patched_fork() else ""
    yield make_check("hooks", fitting == len(table), f"{fitting} of {len(table)} fit{caller}", remedy)
    for target, problem in problems.items():
        if problem is not None:
            yield Check(f"hook {target.rsplit('.', 1)[-1]}", False, f"{target}: {problem}", remedy)


def read_model(path: str) -> "ModelConfig | Check":
    """Read a model as SGLang does. Its code is not run. If it cannot be read, return the failing line."""
    from sglang.srt.configs.model_config import ModelConfig

    missing = model_folder.find_problem(path)
    if missing is not None:
        return Check("model", False, missing, "pass a Hugging Face folder, or a name on the Hub")
    try:
        return ModelConfig(path, trust_remote_code=False)
    except Exception as error:  # transformers and SGLang raise many types of errors
        logger.debug("sglang-ext: %s cannot be read", path, exc_info=True)
        remedy = "pass a Hugging Face folder or name that SGLang serves; the cause is in its config.json"
        return Check("model", False, f"{path}: {one_line(error)}", remedy)


def check_model(path: str, model: "ModelConfig | Check") -> Check:
    """Check that the family of the model that was read from ``path`` can be compressed."""
    if isinstance(model, Check):
        return model
    unsupported = model_options.unsupported_model_reason(model)
    found = f"{path}: {unsupported or model.hf_config.architectures[0]}"
    return make_check("model", unsupported is None, found, "serve this model with --kv-mode full")


def check_kernels(model: "ModelConfig | Check") -> list[Check]:
    """Return a line with the GPU, the shape of the model's attention, and the kernels for it. Empty if SGLang cannot read the model."""
    if isinstance(model, Check):
        return []  # check_model reports the reason.
    group = model.get_num_attention_heads(1) // model.get_num_kv_heads(1)
    stored = getattr(model.hf_config, "dtype", None) or model.dtype
    dtype, stored = (str(each).removeprefix("torch.") for each in (model.dtype, stored))
    # SGLang's --dtype auto uses float16 for float32.
    computed = dtype if dtype == stored else f"{dtype} unless --dtype is set (stored: {stored})"
    shape = f"{model.head_dim} channels a head, {group} query heads a KV head, {computed}"
    if not torch.cuda.is_available():
        return [Check("kernels", True, f"no GPU; {shape}: PyTorch")]
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.shared_memory_per_block_optin // 1024} KiB of shared memory"
    packed = packed_kernels(model.head_dim, group, model.dtype)
    methods = "; ".join(f"{', '.join(names)} {kernels}" for kernels, names in packed.items())
    found = f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {memory}); {shape}: Triton for scores and compressed KV; in few bits: {methods}"
    return [Check("kernels", True, found)]


def packed_kernels(dim: int, group: int, dtype: torch.dtype) -> dict[str, list[str]]:
    """Group the packing methods that work on a GPU by the kernels that read and write their compressed KV, for one shape of heads."""
    from sglang_ext.layers.attention.decode_backend import LARGEST_HEAD, SMALLEST_HEAD
    from sglang_ext.layers.kernels.gpu_launch import multiplies_integers
    from sglang_ext.layers.kernels.packed.pack_blocks import can_pack
    from sglang_ext.layers.kernels.packed.packed_decode import fragments

    if not SMALLEST_HEAD <= dim <= LARGEST_HEAD:
        return {"not for such heads": list(catalogue.on_gpu())}
    found: dict[str, list[str]] = {}
    keys = torch.zeros(1, 1, dim, dtype=dtype, device="cuda")
    buffers = KVBuffers((0,), (1.0,), (keys,), (keys,))
    for name in catalogue.on_gpu():
        try:
            packing = Packing.for_pool(catalogue.quantizer(name, catalogue.code_bits(name, None)), buffers, 1)
        except ValueError:
            found.setdefault("not for such heads", []).append(name)
            continue
        if packing.keys.sums and not multiplies_integers(keys):
            found.setdefault("not on this GPU", []).append(name)
            continue
        reader = "Gluon" if fragments(packing, keys, group) else "Triton"
        writer = "a kernel" if can_pack(packing, buffers) else "PyTorch"
        found.setdefault(f"read by {reader}, packed by {writer}", []).append(name)
    return found


def check_cache_ranks(seconds: float = START_SECONDS) -> Check:
    """Start a cache rank with a dummy configuration, wait up to ``seconds`` until it is ready, and end it.

    The result has the maximum number of ranks, their memory and the devices.
    """
    begun, link = time.monotonic(), None
    shape = BufferShape(layers=1, query_heads=1, kv_heads=1, dim=2, dtype="float32", window=1, lanes=1, most=8, places=1)
    turning = RotaryParameters(frequencies=(1.0,), interleaved=False)
    attach = Attach(VERSION, 1, shape, blocks=1, scaling=(1.0,), predictor="current", sinks=0, recent=0, turning=turning)
    try:
        link = RankLink(attach, ExchangeBuffer(shape, torch.device("cpu"), "cpu"), pack=1)
        link.poll()
        while not link.ready and link.down_reason == "starting" and time.monotonic() < begun + seconds:
            link.wait(0.05)
            link.poll()
        ready, after = link.ready, f"after {time.monotonic() - begun:.1f} s"
        started = f"a process was ready {after}" if ready else f"a process was not ready {after}: {link.down_reason}"
    except OSError as error:
        ready, started = False, f"no process was started: {one_line(error)}"
    finally:
        if link is not None:
            link.end()
    return make_check(CACHE_RANKS, ready, f"{started}; up to {len(os.sched_getaffinity(0))}, one per core; {describe_memory()}; {describe_gpus()}", RANKS_REMEDY)


def describe_memory(shared: Path = Path("/dev/shm")) -> str:
    """Memory that ranks and servers can share. It is anonymous, so the size of ``shared``, which other programs use, is no limit."""
    free = f"{psutil.virtual_memory().available / 1e9:.1f} GB of memory free"
    if not shared.is_dir():
        return f"{free}, no {shared}, which ranks do not need"
    found = shutil.disk_usage(shared)
    return f"{free}, {shared} with {found.free / 1e9:.1f} of {found.total / 1e9:.1f} GB free, which ranks do not take"


def describe_gpus() -> str:
    """GPUs, and which can read each other's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "no GPU: ranks select on CPU cores"
    if count == 1:
        return "one GPU, on which a second stream selects instead of ranks"
    can_read = torch.cuda.can_device_access_peer
    without = [f"{one} and {other}" for one, other in combinations(range(count), 2) if not (can_read(one, other) and can_read(other, one))]
    peers = f"no peer access between {', '.join(without)}" if without else "peer access between all"
    return f"{count} GPUs, {peers}"


def check_prefix_store(url: str) -> Check:
    """Check that a prefix store holds pages: write some of its own, count them, read them and delete them. The line has the rates."""
    try:
        backend = open_backend(url)
    except (OptionError, StoreError) as error:
        remedy = "pass the URL of a store that runs; docs/features/prefix-store.md lists the forms"
        return Check(PREFIX_STORE, False, f"{url}: {one_line(error)}", remedy)
    form = ObjectFormat("sglang-ext doctor", torch.bfloat16, layers=32, heads=2, head_dim=128, page_size=64, form="raw")
    pages = [StoredPage(form, os.urandom(32), 0) for _ in range(STORE_PAGES)]
    try:
        return Check(PREFIX_STORE, True, f"{url}: {_measure_store(backend, pages)}")
    except (StoreError, ObjectError) as error:
        return Check(PREFIX_STORE, False, f"{url}: {one_line(error)}", "start the store again, and give it more room; see its own log")
    finally:
        # A store that failed cannot delete either.
        with suppress(StoreError):
            backend.delete([page.name for page in pages])
        backend.close()


def _measure_store(backend: StoreBackend, pages: Sequence[StoredPage]) -> str:
    """Write, count, read and delete pages. Returns the rates.

    Raises:
        StoreError: The store fails, or lacks what was written.
        ObjectError: A page was not restored.
    """
    form, names = pages[0].form, [page.name for page in pages]
    kv = torch.randn(form.tensors, form.page_size, form.heads, form.head_dim).to(form.dtype)
    objects = [encode_object(page, kv) for page in pages]
    size = sum(part.nbytes for parts in objects for part in parts)
    begin = time.perf_counter()
    for name, parts in zip(names, objects, strict=True):
        backend.put(name, parts)
    written = time.perf_counter()
    found = backend.count_run(names)
    if found < len(names):
        raise StoreError(f"{len(names)} pages were written, and {found} are there: the store is full, or another program deletes its pages")
    restored = torch.empty_like(kv)
    counted = time.perf_counter()
    for page in pages:
        read_page(backend, page, restored)
    seconds = time.perf_counter() - counted
    if not torch.equal(kv, restored):
        raise StoreError("a page that was read differs from the one that was written")
    backend.delete(names)
    if backend.count_run(names):
        raise StoreError("a page that was deleted is still there")
    return f"writes {size / (written - begin) / 1e6:,.0f} MB/s, reads {size / seconds / 1e6:,.0f} MB/s with one thread"
