"""The compression methods that a server offers, of which a request selects one by name: values, combinations, budgets by head, and folders.

The checks raise :class:`~sglang_ext.core.OptionError` with the flag, its value and the remedy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_ext.config import model_options
from sglang_ext.config.options import attention_backends, expected_device
from sglang_ext.config.rules import KVServerArgs, Range
from sglang_ext.core import DEFAULT_BUDGET, OptionError
from sglang_ext.mem_cache.compressors import catalogue

FIRST, MORE = "--kv-compressor", "--kv-more-compressors"
BUDGETS = Range(0, 1, excludes_minimum=True, integers_only=False)


@dataclass(frozen=True)
class OfferedMethod:
    """A method that requests may ask for by its name: NAME, or NAME:BUDGET.

    ``compressor`` is a value of ``--kv-compressor``. ``budget`` is the share of the context's tokens that its compressed KV keeps.
    """

    name: str
    compressor: str
    budget: float

    @property
    def drop_method(self) -> str | None:
        """The method that drops tokens. None if all are kept."""
        return catalogue.parse(self.compressor)[0]

    @property
    def quant_method(self) -> str | None:
        """The method that packs tokens in few bits. None if they are not packed."""
        return catalogue.parse(self.compressor)[1]

    def is_named(self, asked: object) -> bool:
        """Whether a name in a request is this method's name or public name. The budget may be written differently (0.5, .50)."""
        if not isinstance(asked, str):
            return False
        if asked == self.name or asked == self.public_name:
            return True
        compressor, text = catalogue.split(asked)
        try:
            return text is not None and compressor in (self.compressor, self._public_compressor) and float(text) == self.budget
        except ValueError:
            return False

    @property
    def _public_compressor(self) -> str:
        return "+".join(part for part in (self.drop_method, self.quant_method) if part)

    @property
    def public_name(self) -> str:
        """Name in ``meta_info`` and metrics: as ``name``, but a user's own class has its class name, without its file."""
        return self._public_compressor + self.suffix

    @property
    def suffix(self) -> str:
        """The part of its name after the compressor's name."""
        return self.name.removeprefix(self.compressor)


def offered_methods(args: KVServerArgs) -> tuple[OfferedMethod, ...]:
    """All methods of a server, the default of requests first. For arguments after :func:`resolve_methods`."""
    return _offers(args.kv_compressor, args.kv_budget, args.kv_more_compressors or "")


@cache
def _offers(compressor: str, budget: float, more: str) -> tuple[OfferedMethod, ...]:
    # Cached, because it is called for each request and each chunk of its output. parse() registers users' own methods.
    catalogue.parse(compressor)
    return OfferedMethod(compressor, compressor, budget), *(_parsed(item.strip()) for item in more.split(",") if item.strip())


def method_specs(args: KVServerArgs) -> tuple[catalogue.MethodSpec, ...]:
    """The specification of each of :func:`offered_methods`, in the same order, with the flags' bits and partitions."""
    sizes = args.kv_bits, args.kv_partition
    return tuple(catalogue.method(offer.compressor, *(sizes if offer.quant_method else ())) for offer in offered_methods(args))


def drop_methods(args: KVServerArgs) -> set[str]:
    """Names of the methods of a server that drop tokens."""
    return {offer.drop_method for offer in offered_methods(args) if offer.drop_method is not None}


def shared_quant_method(found: tuple[OfferedMethod, ...]) -> str | None:
    """The quantizer that all packing methods of a server share. None if no method packs."""
    return next((offer.quant_method for offer in found if offer.quant_method), None)


def resolve_methods(args: KVServerArgs) -> None:
    """Set the default budget. Refuse methods that the server does not have or cannot combine, and bits that they do not have."""
    more = args.kv_more_compressors
    if more is not None and not any(item.strip() for item in more.split(",")):
        raise OptionError(
            f"{MORE} is {more!r}, which names no method: pass NAME or NAME:BUDGET, with commas between, as in snapkv:0.125,kivi, or leave it out"
        )
    args.kv_budget = resolve_budget(args.kv_compressor, args.kv_budget)
    found = offered_methods(args)
    for place, offer in enumerate(found):
        _check_differs(offer, found[:place])
    pointing = [offer.name for offer in found if catalogue.points(offer.compressor)]
    if pointing and len(found) > 1:
        raise OptionError(
            f"{MORE} makes {pointing[0]} one of {len(found)} methods; its compressed KV points into full KV, and that of other "
            f"methods does not. Use it alone, or pass {', '.join(catalogue.builtin_names(catalogue.packable()))}"
        )
    packs = shared_quant_method(found)
    if packs is not None:
        catalogue.code_bits(packs, args.kv_bits)
        catalogue.partition_size(packs, args.kv_partition)
    _check_folders(args, tuple(offer.compressor for offer in found))


def resolve_budget(compressor: str, budget: float | None, flag: str = FIRST, setting: str = "--kv-budget is {}") -> float:
    """Return the share of tokens that a method, NAME or NAME+NAME, keeps: the requested ``budget``, or if None the method's default.

    Messages name the compressor's ``flag``, and the budget in the format ``setting``.
    """
    drops, packs = catalogue.parse(compressor, flag)
    if budget is None:
        return 1.0 if drops is None else DEFAULT_BUDGET
    if not BUDGETS.allows(budget):
        raise OptionError(f"{setting.format(budget)}; it is the share of the KV cache that is kept: pass {BUDGETS}, for example 0.25")
    if drops is None and budget < 1:
        raise OptionError(
            f"{setting.format(budget)}, but {flag} {packs} keeps all tokens, in few bits: leave it out, or add a method that drops "
            f"tokens: {flag} {catalogue.DEFAULT}+{compressor}"
        )
    return budget


def _parsed(item: str) -> OfferedMethod:
    """Parse one item of ``--kv-more-compressors``."""
    compressor, text = catalogue.split(item)
    try:
        budget = None if text is None else float(text)
    except ValueError:
        raise OptionError(f"{MORE} has {item!r}, where {text!r} is no number: pass NAME or NAME:BUDGET, as in snapkv:0.125,kivi") from None
    return OfferedMethod(item, compressor, resolve_budget(compressor, budget, MORE, f"{MORE} has {item!r}, with budget {{}}"))


def _check_differs(offer: OfferedMethod, before: tuple[OfferedMethod, ...]) -> None:
    """Refuse a method that is listed already, and a second packing method."""
    for other in before:
        if (other.drop_method, other.quant_method, other.budget) == (offer.drop_method, offer.quant_method, offer.budget):
            # A method that only packs has no other budget.
            remedy = "" if offer.drop_method is None else f", or give it another one, as in {offer.compressor}:0.125"
            raise OptionError(f"{MORE} has {offer.name!r}, which is {other.name!r} again, with a budget of {offer.budget:g}: leave it out{remedy}")
    packs = shared_quant_method(before)
    if packs is not None and offer.quant_method not in (None, packs):
        raise OptionError(
            f"{MORE} has {offer.name!r} together with {packs}: slots of blocks, kernels and CUDA graphs are made for one method that "
            f"packs tokens. Leave {offer.quant_method} or {packs} out, or start a server for each. Methods that only drop tokens, and "
            "any budgets, may be combined with it"
        )


def check_methods(args: KVServerArgs) -> None:
    """Refuse methods that hooks or attention cannot serve, after SGLang selected graphs, device and backends."""
    found = offered_methods(args)
    if catalogue.KVZAP in drop_methods(args) and args.cuda_graph_config.prefill.backend == "tc_piecewise":
        raise OptionError(
            "--cuda-graph-backend-prefill is 'tc_piecewise'; --kv-compressor kvzap reads hidden states with hooks, which are "
            "untested in compiled graphs. Pass breakable or disabled."
        )
    others = ", ".join(catalogue.builtin_names(catalogue.packable()))
    if catalogue.points(found[0].compressor):
        model_options.check_compressed_kv_backends(args, f"compressed KV of {FIRST} {found[0].name}", f"one that copies tokens: {others}")
    packed = next((offer for offer in found if offer.quant_method), None)
    if packed is None:
        return
    flag = FIRST if packed is found[0] else MORE
    if packed.quant_method not in catalogue.on_gpu() and args.device != "cpu":
        raise OptionError(
            f"--device is {args.device} with {flag} {packed.name}; {packed.quant_method} packs tokens on a CPU only, on a GPU "
            f"{', '.join(catalogue.builtin_names(catalogue.on_gpu()))} do. Pass {flag} {_packed_by(packed, 'kivi')}, or --device cpu."
        )
    check_partitions(args, lambda: args.get_model_config().head_dim)
    compressed_kv = f"packed KV of {flag} {packed.name}"
    model_options.check_compressed_kv_backends(args, compressed_kv, f"a compressor that only drops tokens: {others}")


def _packed_by(offer: OfferedMethod, packs: str) -> str:
    """The method that drops the same tokens, as it was typed, and packs them with ``packs``."""
    first, second = catalogue.parts(offer.compressor)
    return (f"{first}+{packs}" if second is not None else packs) + offer.suffix


def check_partitions(args: KVServerArgs, head_dim: Callable[[], int | None]) -> None:
    """Refuse partitions of keys that do not divide the model's heads.

    ``head_dim`` returns the channels of a head, None if not known yet. It is called only if keys are partitioned.
    """
    found = offered_methods(args)
    for packed in (offer for offer in found if offer.quant_method):
        partition = catalogue.partition_size(packed.quant_method, args.kv_partition)
        if partition is None or (dim := head_dim()) is None or dim % partition == 0:
            continue
        flag = FIRST if packed is found[0] else MORE
        smaller = [str(size) for size in sorted(catalogue.QUANTIZERS[packed.quant_method].partitions) if dim % size == 0]
        remedy = f"--kv-partition {' or '.join(smaller)}" if smaller else f"{flag} {_packed_by(packed, 'kivi')}"
        raise OptionError(
            f"--kv-partition is {partition}, which does not divide the {dim} channels of the model's heads, along which {flag} {packed.name} "
            f"partitions keys: pass {remedy}"
        )


def resolve_head_budgets(args: KVServerArgs) -> None:
    """Resolve ``--kv-head-budgets auto``, based on measurements (docs/benchmarks.md, "Budgets that differ by head").

    For methods whose scores are more informative over all heads than within one, a verification gives half as many tokens again. A draft
    takes a quarter longer on an H200. So adaptive pays for these methods, and for no other.
    """
    if args.kv_head_budgets == "auto":
        first, *others = offered_methods(args)
        alone = first.drop_method in catalogue.better_uneven() and not others and first.quant_method is None
        device = expected_device(args.device)
        backends = model_options.COMPRESSED_KV_BACKENDS.get(device)
        can_read = backends is not None and attention_backends(args) <= set(backends)
        # In deterministic mode on a GPU attention cannot read uneven heads in a batch with a request that cannot be drafted (planner.py).
        can_read = can_read and (device == "cpu" or not args.enable_deterministic_inference)
        args.kv_head_budgets = "adaptive" if alone and can_read else "equal"


def check_head_budgets(args: KVServerArgs) -> None:
    """Refuse uneven heads if attention cannot read them, after SGLang selected device and backends."""
    if args.kv_head_budgets == "adaptive":
        model_options.check_compressed_kv_backends(args, "compressed KV of --kv-head-budgets adaptive", "--kv-head-budgets equal")


def _check_folders(args: KVServerArgs, compressors: tuple[str, ...]) -> None:
    """Refuse a folder that none of ``compressors``, values of ``--kv-compressor``, reads, and a missing one."""
    for name in catalogue.dropping():
        if (wanted := catalogue.COMPRESSORS[name].reads) is None:
            continue
        folder = getattr(args, wanted.flag.removeprefix("--").replace("-", "_"))
        reader = next((each for each in compressors if catalogue.parse(each)[0] == name), None)
        if reader is not None and folder is None:
            named = "--kv-compressor is" if reader == compressors[0] else "--kv-more-compressors has"
            raise OptionError(
                f"{named} {reader!r}, which {wanted.why}: pass {wanted.flag} FOLDER, written by "
                f"python -m {wanted.maker}, or one of {', '.join(catalogue.online())}"
            )
        if reader is None and folder is not None:
            raise OptionError(
                f"{wanted.flag} is {folder!r} with --kv-compressor {', '.join(compressors)}, which reads none: pass "
                f"--kv-compressor {name}, or leave it out"
            )
        # An empty name would mean the working folder.
        if folder is not None and not (folder and Path(folder).is_dir()):
            module = wanted.maker.split()[0]
            raise OptionError(f"{wanted.flag} is {folder!r}, which is no folder: pass one that python -m {module} wrote to")


COMPRESSOR_PARAM = "kv_compressor"
"""Key of a request's custom_params that names a method."""


def method_index(found: tuple[OfferedMethod, ...], custom_params: dict[str, Any] | None) -> int | None:
    """Index in ``found`` of the method that a request asks for. 0, the first, if it asks for none. None if there is no such method."""
    asked = custom_params.get(COMPRESSOR_PARAM) if isinstance(custom_params, dict) else None
    if asked is None:
        return 0
    return next((place for place, offer in enumerate(found) if offer.is_named(asked)), None)


def check_compressor(args: KVServerArgs, asked: object) -> None:
    """Refuse a request's :data:`COMPRESSOR_PARAM` that is no method of the server: ``ValueError`` names the server's."""
    found = offered_methods(args)
    if method_index(found, {COMPRESSOR_PARAM: asked}) is None:
        raise ValueError(
            f"{COMPRESSOR_PARAM} is {asked!r}; this server compresses with "
            f"{', '.join(offer.public_name for offer in found)}: ask for one of these, or leave it out for the first"
        )
