"""Models, attention backends and graphs that a compressed KV cache supports, checked after SGLang selected them."""

from sglang_ext.config.options import ATTENTION_BACKENDS, DETERMINISTIC_BACKENDS, attention_backends, can_offload_full_kv
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError


def check_model(args: KVServerArgs) -> None:
    """Refuse attention backends, graphs and models (``OptionError``), after SGLang resolved its defaults."""
    if args.cuda_graph_config.prefill.backend == "full":
        raise OptionError(
            f"--cuda-graph-backend-prefill is 'full'; --kv-mode {args.kv_mode} reads the prompt's queries, which such "
            "graphs hide. Pass breakable, tc_piecewise or disabled."
        )
    for backend in sorted(attention_backends(args)):
        if backend not in ATTENTION_BACKENDS:
            raise OptionError(
                f"--attention-backend is {backend!r}; --kv-mode {args.kv_mode} runs with {', '.join(ATTENTION_BACKENDS)}. Pass one of these."
            )
        if args.enable_deterministic_inference and backend not in DETERMINISTIC_BACKENDS:
            raise OptionError(
                f"--attention-backend is {backend!r}; with --enable-deterministic-inference --kv-mode {args.kv_mode} "
                f"runs with {', '.join(DETERMINISTIC_BACKENDS)}: with others a verification rounds differently from a "
                "decode. Pass one of these."
            )
    config = args.get_model_config()
    reason = unsupported_model_reason(config)
    if reason is not None:
        raise OptionError(
            f"--model-path {args.model_path}: {reason}; --kv-mode {args.kv_mode} serves decoder-only "
            "text models with multi-head, grouped-query or multi-query attention over the whole "
            "context, in float weights. Use --kv-mode full for this model."
        )
    exact = args.kv_mode == "verified" and args.enable_deterministic_inference and "triton" in attention_backends(args)
    query_heads, kv_heads = config.get_num_attention_heads(args.tp_size), config.get_num_kv_heads(args.tp_size)
    if exact and query_heads == kv_heads:
        raise OptionError(
            f"--model-path {args.model_path}, --tp-size {args.tp_size}: a rank has {query_heads} query heads and as many KV "
            "heads; with --enable-deterministic-inference and the triton backend --kv-mode verified needs at least two query heads per "
            "KV head: SGLang decodes one with another kernel, which rounds differently. Leave --enable-deterministic-inference out, "
            "pass a smaller --tp-size if that leaves more, or use --kv-mode full."
        )


def check_full_mode(args: KVServerArgs) -> None:
    """Refuse devices and models (``OptionError``) whose KV is not stored in host memory in mode full, after SGLang resolved its defaults."""
    leave = "Leave --kv-host-gb out"
    reason = unsupported_kv_reason(args.get_model_config())
    if reason is not None:
        raise OptionError(
            f"--model-path {args.model_path}: {reason}; --kv-host-gb serves decoder-only text models with multi-head, grouped-query or "
            f"multi-query attention over the whole context. {leave} for this model."
        )
    if args.device not in ("cpu", "cuda"):
        raise OptionError(f"--device is {args.device}; --kv-host-gb copies KV on cpu and cuda. {leave}.")
    if args.disable_radix_cache:
        raise OptionError(f"SGLang has disabled the prefix cache with these options; --kv-host-gb stores the KV of prefixes. {leave}.")


def unsupported_model_reason(config: object) -> str | None:
    """Why a model, with SGLang's ``ModelConfig``, cannot be served from a compressed KV cache. None if it can."""
    reason = unsupported_kv_reason(config)
    if reason is None and config.quantization is not None:
        # Activations scaled over a whole batch would make the output depend on other requests' drafts.
        return f"its weights are quantized ({config.quantization}), which is untested"
    return reason


def unsupported_kv_reason(config: object) -> str | None:
    """Why the KV of a model, with SGLang's ``ModelConfig``, is not one key and one value of each token, layer and KV head. None if it is."""
    from sglang.srt.configs.model_config import AttentionArch

    text = config.hf_text_config
    if config.attention_arch == AttentionArch.MLA:
        return "it uses multi-head latent attention (MLA)"
    if getattr(config, "is_hybrid_swa", False) or _uses_sliding_window(text):
        return "it uses sliding-window attention"
    recurrent = any(hasattr(text, name) for name in ("mamba_d_state", "linear_num_key_heads", "layers_block_type"))
    if recurrent or any("attention" not in kind for kind in getattr(text, "layer_types", None) or ()):
        return "it is a hybrid of attention and recurrent layers"
    if config.is_multimodal:
        return "it is multimodal"
    if not config.is_generation:
        return "it does not generate"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    return None


def _uses_sliding_window(text: object) -> bool:
    if getattr(text, "sliding_window", None) is None or getattr(text, "use_sliding_window", True) is False:
        return False
    kinds = getattr(text, "layer_types", None)
    return kinds is None or any("sliding" in kind for kind in kinds)


# Attention backends that serve such compressed KV, by device. On a CPU the backend reads it. On a GPU draft steps use a backend of ours,
# and these do the rest.
COMPRESSED_KV_BACKENDS: dict[str, tuple[str, ...]] = {"cpu": ("torch_native",), "cuda": ("flashinfer", "triton", "fa3")}


def check_compressed_kv_backends(args: KVServerArgs, compressed_kv: str, remedy: str) -> None:
    """Refuse devices, backends and schedules that cannot read compressed KV without plain tokens, after SGLang selected them.

    ``OptionError`` names SGLang's selection, the ``compressed_kv`` and the ``remedy``.
    """
    found = attention_backends(args)
    if found - set(COMPRESSED_KV_BACKENDS.get(args.device, ())):
        readers = ", on ".join(f"{device} with {', '.join(allowed)}" for device, allowed in COMPRESSED_KV_BACKENDS.items())
        raise OptionError(
            f"--device is {args.device} and --attention-backend {', '.join(sorted(found))}; {compressed_kv} can be read on {readers}. "
            f"Pass one of these, or {remedy}."
        )
    if args.device != "cpu" and args.enable_deterministic_inference and can_offload_full_kv(args):
        raise OptionError(
            f"--kv-full-tier is {args.kv_full_tier!r} with --enable-deterministic-inference; a GPU reads {compressed_kv} one token per "
            "request at a time: requests that decode on full KV in the same steps would round differently. "
            f"Pass --kv-full-tier device, or {remedy}."
        )
