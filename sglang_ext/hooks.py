"""Everything that touches a private SGLang name, in one place.

Each hook says its target, its kind, why it is needed and which parameters it expects of the
target; each use names what is called or set without being hooked. :func:`check` resolves all of
them when a mode is switched on; a target that moved or changed its signature stops the start with
a message that names it. Nothing here is applied while ``--kv-mode`` is ``full``.
"""

import dataclasses
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass


class HookError(RuntimeError):
    """This SGLang is not the one that the hooks were written for."""


@dataclass(frozen=True)
class Hook:
    """One place where sglang-ext enters SGLang.

    Attributes:
        target: dotted name of the function or method.
        kind: ``around`` (called with the original first) or ``replace``.
        hook: dotted name of ours, imported only when the hook is applied.
        why: what would go wrong without it.
        expects: parameter names of the target, in order.
        process: ``frontend`` (tokenizer and HTTP server) or ``scheduler``.
    """

    target: str
    kind: str
    hook: str
    why: str
    expects: tuple[str, ...]
    process: str


@dataclass(frozen=True)
class Use:
    """A private SGLang name that is called or set, not hooked.

    Attributes:
        target: dotted name of the function, method or dataclass.
        why: what it is needed for.
        expects: a function's parameter names in order, or the fields needed of a dataclass.
    """

    target: str
    why: str
    expects: tuple[str, ...]


HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        kind="around",
        hook="sglang_ext.managers.meta_info.add_kv_fields",
        why="meta_info shall tell drafts, verifies and accepted length of the request",
        expects=("self", "meta_info", "recv_obj", "i"),
        process="frontend",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        kind="around",
        hook="sglang_ext.managers.results.process_emitted",
        why="in an iteration most requests only draft: they have no tokens to stream or count",
        expects=("self", "batch", "result"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
        kind="around",
        hook="sglang_ext.mem_cache.query_window.cap_prefix_match",
        why="a prefix hit must leave enough new queries for a compressor that scores by queries",
        expects=("self", "input_len"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        kind="around",
        hook="sglang_ext.managers.finish.end_at_first",
        why="of tokens accepted together, the first that ends the output ends it, as without speculation",
        expects=("self", "new_accepted_len"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        kind="around",
        hook="sglang_ext.managers.penalties.restore_penalties",
        why="penalties must not depend on the process, nor forget a retracted request's output",
        expects=("self",),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        kind="around",
        hook="sglang_ext.mem_cache.give_back.give_back_when_full",
        why="a full pool takes compressed copies back before it retracts a request",
        expects=("self", "selected_indices"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        kind="around",
        hook="sglang_ext.mem_cache.recompute.retract_lost",
        why="a request whose full KV came back changed from the host is computed again",
        expects=("self", "server_args"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_tree_cache",
        kind="around",
        hook="sglang_ext.mem_cache.tree_integrity.check_when_idle",
        why="an idle scheduler checks its prefix tree, of which SGLang checks other kinds only",
        expects=("self",),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool",
        kind="around",
        hook="sglang_ext.managers.algorithm.get_draft_kv_pool",
        why="SGLang assumes that each registered algorithm has a draft model with a pool",
        expects=("draft_worker", "spec_algorithm", "server_args"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        kind="around",
        hook="sglang_ext.mem_cache.query_window.record_queries",
        why="compressors score keys by the queries of the newest tokens",
        expects=("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="around",
        hook="sglang_ext.managers.method_choice.refuse_unknown",
        why="a request that asks for a method that the server does not have shall be told so",
        expects=("self", "obj", "input_ids"),
        process="frontend",
    ),
)

PLAIN_CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        kind="replace",
        hook="sglang_ext.platforms.torch_kernels.assign_req_to_token_pool",
        why="SGLang's is a Triton kernel",
        expects=(
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        process="scheduler",
    ),
    Hook(
        target="sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        kind="replace",
        hook="sglang_ext.platforms.torch_kernels.enable_batch_invariant_mode",
        why="SGLang's batch-invariant operators are Triton kernels",
        expects=("enable_bmm",),
        process="scheduler",
    ),
    Hook(
        target="sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        kind="replace",
        hook="sglang_ext.platforms.torch_kernels.murmur_hash32",
        why="SGLang's is a Triton kernel",
        expects=("seed", "positions", "col_indices"),
        process="scheduler",
    ),
    *(
        Hook(
            target=f"sglang.srt.lora.lora_manager.LoRAManager.{name}",
            kind="around",
            hook="sglang_ext.platforms.plain_cpu.without_pinning",
            why="SGLang pins adapters and their batches; torch refuses to without an accelerator",
            expects=("self", *parameters),
            process="scheduler",
        )
        for name, parameters in {
            "init_state": ("max_lora_rank", "target_modules", "lora_paths"),
            "load_lora_weights": ("lora_ref",),
            "load_lora_weights_from_tensors": ("lora_ref", "tensors"),
            "prepare_lora_batch": ("forward_batch",),
        }.items()
    ),
)


USES: tuple[Use, ...] = (
    Use(
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._accept_grammar_tokens",
        why="grammars advance after the search for the end of an output, as without speculation",
        expects=("self", "req", "tokens"),
    ),
    Use(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",
        why="a request whose full KV is lost gives back what it holds",
        expects=("self", "idx", "remaing_req_count", "server_args"),
    ),
    Use(
        target="sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._handle_finish_state_updated_req",
        why="an aborted request whose drafts gather finishes without a new token",
        expects=("self", "req", "batch", "result", "i", "logits_output"),
    ),
    Use(
        target="sglang.srt.managers.utils.GenerationBatchResult",
        why="it carries accepted tokens, and that their grammars were advanced",
        expects=("accept_lens", "new_seq_lens", "grammar_advanced", "grammar_retained_tokens"),
    ),
    Use(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        why="predicted scores are kept at the slots to which a forward writes its KV",
        expects=("out_cache_loc",),
    ),
    Use(
        target="sglang.srt.lora.lora_manager.LoRAManager.fetch_new_loras",
        why="a batch's adapters are fetched before its forward (prepare_lora_batch is hooked on a CPU)",
        expects=("self", "new_loras", "running_loras"),
    ),
    Use(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        why="its subclass tells attention backends the lengths of a captured verification",
        expects=("self", "num_tokens"),
    ),
    Use(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
        why="its subclass replays steps over copies, which read the token table to their end",
        expects=("self", "forward_batch", "pp_proxy_tensors"),
    ),
    Use(
        target="sglang.kernels.ops.attention.decode_attention._decode_softmax_reducev_fwd",
        why="parts of a verification's attention are merged as SGLang merges those of a decode",
        expects=(
            *("logits", "lse", "q", "o", "v_scale", "v_buffer", "kv_indptr"),
            *("num_kv_splits", "max_kv_splits", "sinks", "use_pdl"),
        ),
    ),
    Use(
        target="sglang.srt.layers.attention.flashinfer_backend.fast_prefill_plan",
        why="verifications are planned from lengths on the host",
        expects=(
            *("self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
            *("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo", "custom_mask", "causal"),
            *("window_left", "q_data_type", "kv_data_type", "o_data_type", "non_blocking", "fixed_split_size"),
            *("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"),
            *("qo_indptr_host", "kv_indptr_host", "kv_lens_host", "max_q_len", "max_kv_len"),
        ),
    ),
)


def entries() -> tuple[Hook | Use, ...]:
    """Everything that must fit the installed SGLang before a mode starts."""
    return HOOKS + PLAIN_CPU_HOOKS + USES


def check(mode: str) -> None:
    """Check every hook and every use against the installed SGLang.

    Raises:
        HookError: a target is missing or has other parameters or fields than expected.
    """
    for entry in entries():
        problem = find_problem(entry)
        if problem is not None:
            raise HookError(
                f"--kv-mode {mode} cannot start: {entry.target} does not fit ({problem}). It is "
                f"needed because {entry.why}. Install sglang==0.5.17, or use --kv-mode full."
            )


def find_problem(entry: Hook | Use) -> str | None:
    """What keeps a hook or a use from fitting the installed SGLang; None when it fits."""
    try:
        target = pkgutil.resolve_name(entry.target)
    except (ImportError, AttributeError) as error:
        return f"no such name: {error}"
    if dataclasses.is_dataclass(target):
        missing = set(entry.expects) - {field.name for field in dataclasses.fields(target)}
        return f"no field is called {', '.join(sorted(missing))}" if missing else None
    found = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    if found != entry.expects:
        return f"parameters are {', '.join(found)}; expected {', '.join(entry.expects)}"
    return None


def apply(hooks: tuple[Hook, ...]) -> None:
    """Register hooks with SGLang's registry and apply them now.

    Applying is idempotent. SGLang's registry logs a failure and goes on; this raises.

    Raises:
        HookError: a hook did not take effect.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if hook.target not in HookRegistry._hooks:
            HookRegistry.register(hook.target, _load(hook.hook), HookType(hook.kind))
    HookRegistry.apply_hooks()
    for hook in hooks:
        if hook.target not in HookRegistry._patched:
            raise HookError(f"the hook on {hook.target} was not applied; see the log for the reason")


def _load(name: str) -> Callable:
    return pkgutil.resolve_name(name)


def is_patched_fork() -> bool:
    """Whether this SGLang is a fork with the series of ``patches/``, which calls the hooks itself."""
    return importlib.util.find_spec("sglang.srt.kv_seams") is not None


def activate_frontend() -> None:
    """Apply the hooks of the tokenizer and HTTP process."""
    if not is_patched_fork():
        apply(tuple(hook for hook in HOOKS if hook.process == "frontend"))


def activate_scheduler() -> None:
    """Apply the hooks of the scheduler process."""
    if not is_patched_fork():
        apply(tuple(hook for hook in HOOKS if hook.process == "scheduler"))


def activate_plain_cpu() -> None:
    """Apply what the plain CPU platform replaces, in any mode."""
    apply(PLAIN_CPU_HOOKS)
