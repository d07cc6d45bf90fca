"""The flags of a benchmark's servers, looked at as each server will, before the first of them starts."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.plugins import load_plugins

from sglang_ext import flag_checks
from sglang_ext.arguments import KVServerArgs
from sglang_ext.config import (
    method_options,
    options,
    refused_options,
    selection_options,
    transports,
)
from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.config.model_folder import kv_shape, read_config
from sglang_ext.config.options import BACKEND
from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer.link_settings import options_mismatch
from sglang_ext.tools import ROLES, CommandError
from sglang_ext.tools.server_process import PROMPTS

# What servers of both roles must name alike, and with backend progressive.
ALIKE = ("disaggregation_transfer_backend",)
ALIKE_LINKS = ("kv_reference", "kv_bench_codec", "tp_size")

# Of --dtype and --kv-cache-dtype: what names mean the same.
AUTO, SAME_DTYPE = "auto", {"half": "float16", "float": "float32", "bf16": "bfloat16"}

# Tokens of the context that SGLang's scheduler keeps free beside a prompt and its answer, which it cuts to fit, and says nothing.
SPARED = 2

CONFIG = "--config"
"""SGLang's flag: a file holds further flags, which only the server reads."""


class _Parser(argparse.ArgumentParser):
    """Raises where a program would end."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(" ".join(message.split()))


class _Unresolved(KVServerArgs):
    """Arguments that are checked alone: SGLang chooses nothing for them, but for the device."""

    def __post_init__(self) -> None:
        flag_checks.check_flags(self)
        if self.kv_mode != "full":
            refused_options.check_combinations(self)
            self.device = options.expected_device(self.device)
            selection_options.check_device(self)


def check(model: str, servers: Mapping[str, Sequence[str]], tokens: int = 0, prompts: str = PROMPTS) -> None:
    """Refuse flags that one of the servers would end at.

    Args:
        model: folder or name.
        servers: the flags of each, by its name.
        tokens: of the longest request that they will be sent, its answer among them; 0 where that is not known.
        prompts: the benchmark's option that says how long prompts are.

    Raises:
        CommandError: names the server, the flag, what is allowed and the remedy.
    """
    load_plugins()  # as a server does: SGLang makes the parser of the class that is put in place of its own
    parser = _Parser(add_help=False)
    KVServerArgs.add_cli_args(parser)
    del parser.error  # of this one object, set there: it ends the program
    of_roles = {}
    for name, flags in servers.items():
        if CONFIG in flags:
            continue
        try:
            given = parser.parse_args(["--model-path", model, *flags])
            fields = (each.name for each in dataclasses.fields(KVServerArgs))
            args = _Unresolved(**{each: getattr(given, each) for each in fields if hasattr(given, each)})
            _check_transport(args)
            if args.kv_mode != "full":
                method_options.check_partitions(args, lambda: _head_dim(Path(model)))
                if layers := _config(Path(model)).get("num_hidden_layers"):
                    selection_options.check_layer_packs(args, layers)
            of_roles.setdefault(args.disaggregation_mode, (name, args))
        except (CommandError, OptionError) as error:
            raise CommandError(f"the server {name} cannot start: {error}") from error
        _check_length(Path(model), name, args, tokens, prompts)
    if of_roles.keys() >= set(ROLES):
        _check_alike(*(of_roles[role] for role in ROLES))


def _check_length(model: Path, name: str, args: KVServerArgs, tokens: int, prompts: str) -> None:
    """Refuse requests longer than the context that the server of a model in a folder serves, where that is known; ``prompts`` is the option
    that says how long prompts are."""
    context = args.context_length or _context_length(model, args)
    if context is not None and tokens > context - SPARED:
        raise CommandError(
            f"the server {name} serves prompts of up to {context - SPARED} tokens with their answers, and the longest has {tokens}: pass "
            f'shorter prompts ({prompts}) or a shorter --output-len, or, where the model can, '
            f'--server-arg="--context-length {tokens + SPARED}"'
        )


def _config(model: Path) -> dict[str, Any]:
    """The ``config.json`` in a model's folder; empty where it is none.

    Raises:
        CommandError: it cannot be read.
    """
    return read_config(model) if (model / "config.json").is_file() else {}


def _context_length(model: Path, args: KVServerArgs) -> int | None:
    """Tokens of the model's longest context; None where only its server will know."""
    config = _config(model) if args.json_model_override_args == "{}" else {}
    return None if config.get("rope_scaling") else config.get("max_position_embeddings")


def _head_dim(model: Path) -> int | None:
    """Channels of a head of the model in a folder; None where only its server will know.

    Raises:
        CommandError: its ``config.json`` cannot be read.
    """
    config = _config(model)
    known = "num_attention_heads" in config and (config.get("head_dim") or "hidden_size" in config)
    return kv_shape(config)[1] if known else None


def _check_transport(args: KVServerArgs) -> None:
    """Refuse a transport of KV that does not work on this machine."""
    backend = args.disaggregation_transfer_backend
    why = None if args.disaggregation_mode == "null" else transports.transport_obstacle(backend)
    if why is not None:
        raise CommandError(f"--disaggregation-transfer-backend is {backend}: {why}")


def _check_alike(one: tuple[str, KVServerArgs], other: tuple[str, KVServerArgs]) -> None:
    """Refuse a prefill and a decode server whose links would not fit."""
    links = one[1].disaggregation_transfer_backend == BACKEND
    for flag in (*ALIKE, *(ALIKE_LINKS if links else ())):
        found = [getattr(args, flag) for _, args in (one, other)]
        if found[0] != found[1]:
            raise CommandError(
                f"--{flag.replace('_', '-')} is {found[0]} of the server {one[0]} and {found[1]} of the server {other[0]}: "
                "give both the same"
            )
    _check_pages(one, other)
    if links:
        _check_pools(one, other)
    # Empty unless links send prompts as codes.
    codes = [quantized_transfer_settings(args) for _, args in (one, other)]
    if codes[0] != codes[1]:
        raise CommandError(f"the servers {one[0]} and {other[0]} differ in {options_mismatch(*codes)}")


def _check_pages(one: tuple[str, KVServerArgs], other: tuple[str, KVServerArgs]) -> None:
    """Refuse pages of different sizes, at which SGLang ends the decode server with the first request; without a flag they have one token,
    but in mode full, where SGLang may choose others."""
    pages = [args.page_size or (None if args.kv_mode == "full" else 1) for _, args in (one, other)]
    if None not in pages and pages[0] != pages[1]:
        raise CommandError(f"--page-size is {pages[0]} of the server {one[0]} and {pages[1]} of the server {other[0]}: give both the same")


def _check_pools(one: tuple[str, KVServerArgs], other: tuple[str, KVServerArgs]) -> None:
    """Refuse pools of different numbers, where flags say which, and keys of links at one end alone."""
    pools = [_pool_dtype(args) for _, args in (one, other)]
    if None not in pools and pools[0] != pools[1]:
        raise CommandError(
            f"the KV pool is {pools[0]} of the server {one[0]} and {pools[1]} of the server {other[0]}: give both the same --dtype and the "
            "same --kv-cache-dtype"
        )
    if (one[1].kv_link_keys is None) != (other[1].kv_link_keys is None):
        has, lacks = (one[0], other[0]) if one[1].kv_link_keys is not None else (other[0], one[0])
        raise CommandError(f"the server {has} has --kv-link-keys and the server {lacks} has none: give both the same file, or neither")


def _pool_dtype(args: KVServerArgs) -> str | None:
    """Of a server's KV pool, as its flags say it; None where the model does."""
    name = args.dtype if args.kv_cache_dtype == AUTO else args.kv_cache_dtype
    return None if name == AUTO else SAME_DTYPE.get(name, name)
