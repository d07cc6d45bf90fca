"""Checks the flags of several servers as the servers do, before the first one starts."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.plugins import load_plugins

from sglang_ext import flag_checks
from sglang_ext.arguments import CheckedServerArgs
from sglang_ext.config import disaggregation_options, method_options, options, selection_options
from sglang_ext.config.model_folder import kv_shape, read_config
from sglang_ext.config.rules import option
from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.wire import options_mismatch
from sglang_ext.tools import ROLES, CommandError

EQUAL_LINK_FIELDS = ("kv_reference", "kv_bench_codec", "tp_size")
"""Server arguments that must be equal for a prefill and a decode server with transfer backend ``progressive``."""
DTYPE_ALIASES = {"half": "float16", "float": "float32", "bf16": "bfloat16"}
"""Names of ``--dtype`` and ``--kv-cache-dtype`` with the same meaning."""
CONFIG = "--config"
"""SGLang's flag for a file with further flags, which only the server reads."""


class _UnresolvedArgs(CheckedServerArgs):
    """Server arguments that are only checked. SGLang's defaults are not resolved, except the device."""

    def __post_init__(self) -> None:
        flag_checks.check_flags(self)
        if self.kv_mode != "full":
            self.device = options.expected_device(self.device)
            flag_checks.check_device(self)


def check(model: str, servers: Mapping[str, Sequence[str]]) -> None:
    """Check the flags of several servers, as :func:`sglang_ext.tools.server_process.check_servers` in another process."""
    load_plugins()  # as a server does: the plugin's class replaces SGLang's server arguments
    parser = argparse.ArgumentParser(add_help=False)
    CheckedServerArgs.add_cli_args(parser)
    parser.error = _refuse  # argparse's would end the process
    by_role: dict[str, tuple[str, CheckedServerArgs]] = {}
    for name, flags in servers.items():
        if CONFIG in flags:
            continue
        try:
            parsed = parser.parse_args(["--model-path", model, *flags])
            fields = (each.name for each in dataclasses.fields(CheckedServerArgs))
            args = _UnresolvedArgs(**{each: getattr(parsed, each) for each in fields if hasattr(parsed, each)})
            backend = args.disaggregation_transfer_backend
            if args.disaggregation_mode != "null" and (obstacle := disaggregation_options.transport_obstacle(backend)) is not None:
                raise CommandError(f"--disaggregation-transfer-backend is {backend}: {obstacle}")
            if args.kv_mode != "full":
                method_options.check_partitions(args, lambda: _head_dim(Path(model)))
                if layers := _config(Path(model)).get("num_hidden_layers"):
                    selection_options.check_layer_packs(args, layers)
            by_role.setdefault(args.disaggregation_mode, (name, args))
        except (CommandError, OptionError) as error:
            raise CommandError(f"the server {name} cannot start: {error}") from error
    if by_role.keys() >= set(ROLES):
        _check_pair(*(by_role[role] for role in ROLES))


def _refuse(message: str) -> NoReturn:
    raise CommandError(" ".join(message.split()))


def _config(model: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model folder. Returns an empty dictionary if there is no such file."""
    return read_config(model) if (model / "config.json").is_file() else {}


def _head_dim(model: Path) -> int | None:
    """Channels of a KV head. None if only the server can determine it."""
    config = _config(model)
    known = "num_attention_heads" in config and (config.get("head_dim") or "hidden_size" in config)
    return kv_shape(config)[1] if known else None


def _check_pair(one: tuple[str, CheckedServerArgs], other: tuple[str, CheckedServerArgs]) -> None:
    """Refuse a prefill and a decode server that cannot transfer KV to each other. Each server is a name and its arguments."""
    has_links = one[1].disaggregation_transfer_backend == options.BACKEND
    flags = ("disaggregation_transfer_backend", *(EQUAL_LINK_FIELDS if has_links else ()))
    compared = {flag: [getattr(args, flag) for _, args in (one, other)] for flag in flags}
    # With different page sizes SGLang's decode server crashes at the first request. Without a flag a page has one token. In mode full SGLang
    # may choose another size, which is not known here.
    pages = [args.page_size or (None if args.kv_mode == "full" else 1) for _, args in (one, other)]
    if None not in pages:
        compared["page_size"] = pages
    for flag, values in compared.items():
        if values[0] != values[1]:
            raise CommandError(f"{option(flag)} is {values[0]} of the server {one[0]} and {values[1]} of the server {other[0]}: give both the same")
    if has_links:
        _check_pools_and_keys(one, other)
    quantized = [disaggregation_options.quantized_transfer_settings(args) for _, args in (one, other)]
    if quantized[0] != quantized[1]:
        raise CommandError(f"the servers {one[0]} and {other[0]} differ in {options_mismatch(*quantized)}")


def _check_pools_and_keys(one: tuple[str, CheckedServerArgs], other: tuple[str, CheckedServerArgs]) -> None:
    """Refuse KV pools of different dtypes, if flags determine them, and link keys at one server alone."""
    dtypes = [_pool_dtype(args) for _, args in (one, other)]
    if None not in dtypes and dtypes[0] != dtypes[1]:
        raise CommandError(
            f"the KV pool is {dtypes[0]} of the server {one[0]} and {dtypes[1]} of the server {other[0]}: give both the same --dtype and the "
            "same --kv-cache-dtype"
        )
    if (one[1].kv_link_keys is None) != (other[1].kv_link_keys is None):
        has, lacks = (one[0], other[0]) if one[1].kv_link_keys is not None else (other[0], one[0])
        raise CommandError(f"the server {has} has --kv-link-keys and the server {lacks} has none: give both the same file, or neither")


def _pool_dtype(args: CheckedServerArgs) -> str | None:
    """The dtype of a server's KV pool. None if the model determines it."""
    name = args.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    return None if name == "auto" else DTYPE_ALIASES.get(name, name)
