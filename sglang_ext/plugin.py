"""The plugin's only entry point: SGLang calls :func:`register` in each process it starts.

It adds sglang-ext to SGLang's registries (arguments, speculative algorithm, radix cache backend, transfer backend). Nothing uses
these entries without ``--kv-mode``, ``--kv-host-gb`` or ``--disaggregation-transfer-backend progressive``.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.command_line import exit_on_refusal
from sglang_ext.config.options import BACKEND
from sglang_ext.core import RADIX_CACHE_BACKEND, SPECULATIVE_ALGORITHM
from sglang_ext.hooks import activation as hooking, table, transfer_table

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache


def register() -> None:
    """Register the flags, the speculative algorithm, the radix cache backend and the transfer backend. A patched fork contains them."""
    if hooking.is_patched_fork():
        return
    from sglang_ext.arguments import CheckedServerArgs

    HookRegistry.register("sglang.srt.server_args.ServerArgs", CheckedServerArgs, HookType.REPLACE)
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        # Engine bound the original class when its module was loaded.
        engine.Engine.server_args_class = CheckedServerArgs
    hooking.register(table.KV_CLASS_HOOK)
    register_backends()


def register_backends() -> None:
    """Register the speculative algorithm, the radix cache backend and the transfer backend, once per process."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_ext.hooks.algorithm import KVVerifiedAlgorithm, worker_class

    if get_spec(SPECULATIVE_ALGORITHM) is None:
        SpeculativeAlgorithm.register(SPECULATIVE_ALGORITHM, supports_overlap=True, spec_class=KVVerifiedAlgorithm)(worker_class)
    if get_radix_cache_factory(RADIX_CACHE_BACKEND) is None:
        register_radix_cache_backend(RADIX_CACHE_BACKEND, create_tree)
    register_transfer_backend()


@exit_on_refusal
def create_tree(context: "TreeCacheBuildContext") -> "TieredRadixCache":
    """Create the prefix tree of a scheduler, with all that is attached to it. SGLang calls it before the server is ready."""
    from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache

    args, worker, tree = context.server_args, context.tp_worker, TieredRadixCache(context.params)
    if args.kv_mode != "full":
        worker.kv_worker.bind_tree_cache(tree)
    elif args.kv_host_gb:
        from sglang_ext.managers.prefix_storage import attach_in_full_mode

        attach_in_full_mode(tree, args, worker.model_runner)
    if tree.stored is not None:
        from sglang_ext.managers.prefix_storage import refuse_weight_updates

        refuse_weight_updates(worker)
    return tree


def register_transfer_backend() -> None:
    """Add the backend's name to SGLang's flags and its enumeration of backends, once per process."""
    from sglang.srt import server_args
    from sglang.srt.disaggregation.utils import TransferBackend

    if BACKEND not in server_args.DISAGG_TRANSFER_BACKEND_CHOICES:
        server_args.add_disagg_transfer_backend_choices([BACKEND])
    if BACKEND not in TransferBackend._value2member_map_:
        member = object.__new__(TransferBackend)
        member._name_, member._value_ = BACKEND.upper(), BACKEND
        member.__objclass__, member._sort_order_ = TransferBackend, len(TransferBackend)
        TransferBackend._member_names_.append(member.name)
        TransferBackend._member_map_[member.name] = TransferBackend._value2member_map_[BACKEND] = member


def get_kv_class(original: Callable, transfer_backend: "TransferBackend", class_type: "KVClassType") -> type | None:
    """Hook around ``get_kv_class``: returns the classes of this backend, or SGLang's own for other backends."""
    if transfer_backend.value != BACKEND:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
    from sglang.srt.disaggregation.utils import KVClassType

    stock = {KVClassType.KVARGS: KVArgs, KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer}
    if class_type in stock:
        return stock[class_type]
    from sglang_ext.managers.kv_transfer.progressive.manager import ProgressiveManager
    from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender

    if class_type is KVClassType.MANAGER:
        # Once per scheduler process, before its first request.
        hooking.activate(transfer_table.TRANSFER_HOOKS)
    ours = {
        KVClassType.MANAGER: ProgressiveManager,
        KVClassType.SENDER: ProgressiveSender,
        KVClassType.RECEIVER: ProgressiveReceiver,
    }
    return ours[class_type]
