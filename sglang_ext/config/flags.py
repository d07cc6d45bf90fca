"""The table of flags.

To add a flag, add a field to :class:`~sglang_ext.config.rules.KVServerArgs`, and an entry here. The parser, the help, the checks,
docs/flags.md and the tests are made from the table. Then run ``sglang-ext-bench manual``, and add the flag to
patches/sglang-0.5.17/0002-arguments.patch.
Checks that read files, the model or the machine are functions (flag_checks.py).
"""

import dataclasses

from sglang_ext.config import combinations, disaggregation_options, method_options, options, request_params
from sglang_ext.config import selection_options as selection
from sglang_ext.config.combinations import (
    BACKEND_OPTION, BURST_LIMITS_ROUND, CAN_OFFLOAD_FULL_KV, HAS_NO_OFFLOAD_OBSTACLE, HAS_ONLINE_METHOD,
    HAS_PROGRESSIVE_TRANSFER, HAS_RANKS, HAS_SELECTOR, HAS_STORE, HAS_TIMELINE, IS_NOT_PREFILL_SERVER, IS_PREFILL_SERVER, IS_SPADE, IS_VERIFIED, NEEDS_ONLINE_METHOD, SELECTS_FEWER_THAN_ALL,
)  # fmt: skip
from sglang_ext.config.rules import ANY_MODE, Flag, KVServerArgs, Range, Refusal, one_of, refuse_if_set
from sglang_ext.core import DEFAULT_BUDGET, MIN_CONTEXT
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.selection.predictors import PREDICTORS
from sglang_ext.mem_cache.selection.scoring_keys import EXACT, SCORE_BITS

# Sections of docs/flags.md, in the order of the page.
GROUPS = (
    *("Mode", "What the compressed cache keeps", "Tokens selected for each step", "Drafts", "Streams", "Full KV in host memory"),
    *("Transfer of KV between servers", "For benchmarks and tests"),
)
SECTION_MODE, SECTION_KEPT, SECTION_SELECTED, SECTION_DRAFTS, SECTION_STREAMS, SECTION_HOST, SECTION_TRANSFER, SECTION_BENCH = GROUPS
COMPARABLE = ", ".join(catalogue.comparable())
KEEPS_TOKENS = "it keeps tokens as they are"
ONLY_VERIFIED = Refusal("--kv-mode lossy", lambda args: args.kv_mode != "verified", "it verifies nothing", "pass --kv-mode verified")


def _has_no_quantizer(args: KVServerArgs) -> bool:
    return method_options.shared_quant_method(method_options.offered_methods(args)) is None


TABLE: dict[str, Flag] = {
    "kv_mode": Flag(
        text="full: stock SGLang; with --kv-host-gb also host memory and a prefix store. verified: draft on compressed KV and verify on full "
        "KV, with the outputs of full. lossy: decode on compressed KV alone.",
        group=SECTION_MODE, values=options.MODES, conflicts=combinations.REFUSALS,
    ),
    "kv_compressor": Flag(
        text=f"How the KV cache is compressed: by dropping tokens ({', '.join(catalogue.dropping())}), by packing them in few bits "
        f"({', '.join(catalogue.packing())}), or both, as in {catalogue.DEFAULT}+kivi. Or a class of your own, in a file or in an "
        "installed module: ./my_method.py:KeyNorm, package.module:KeyNorm. "
        f"On a CPU only: {', '.join(sorted(set(catalogue.packing()) - set(catalogue.on_gpu())))}.",
        group=SECTION_KEPT,
        conflicts=(
            Refusal(
                "--kv-mode lossy", lambda args: args.kv_mode == "lossy" and catalogue.needs_verifications(args.kv_compressor),
                "nothing is verified, and verifications select the tokens that it keeps",
                "use --kv-mode verified, or --kv-compressor snapkv",
            ),
            Refusal(
                "--device {args.device}",
                lambda args: args.device != "cpu"
                and selection.has_selector(args) and not selection.is_spade(args) and not selection.has_attention_selector(args),
                "it selects tokens on a CPU alone",
                "pass --kv-compressor spade, verify-guided or, on an NVIDIA GPU, quest, or --device cpu", needs_device=True,
            ),
            Refusal(
                "--page-size {args.page_size}",
                lambda args: selection.has_attention_selector(args) and (args.page_size or 1) % Quest.page != 0,
                f"on a GPU it selects pages of {Quest.page} tokens, which must be pages of the pool",
                f"pass --page-size {Quest.page}", needs_device=True,
            ),
            Refusal(
                "--disaggregation-mode {args.disaggregation_mode}",
                lambda args: selection.has_attention_selector(args) and args.disaggregation_mode != "null",
                "on a GPU forwards compute the smallest and largest keys of pages, and these are not transferred with the KV",
                "pass --kv-compressor spade", needs_device=True,
            ),
        ),
    ),
    "kv_budget": Flag(
        text=f"Share of the context's tokens that compressed KV keeps. Default: {DEFAULT_BUDGET}, or 1 if tokens are only packed.",
        group=SECTION_KEPT, values=(method_options.BUDGETS,), example=0.25,
        conflicts=(
            Refusal(
                "--kv-select {args.kv_select}", lambda args: args.kv_select is not None and selection.has_selector(args),
                "both say how many tokens each KV head reads", "leave --kv-select out",
            ),
        ),
    ),
    "kv_sparse_from": Flag(
        text="Context length from which KV is compressed. Shorter contexts are read whole. Requests draft (verified) or become "
        f"approximate (lossy) from this length on. Below {MIN_CONTEXT} tokens compression saves too little.",
        group=SECTION_KEPT, values=(Range(MIN_CONTEXT, unit="tokens"),), example=4096,
    ),
    "kv_bits": Flag(
        text="Bits of a packed number: "
        + "; ".join(f"{name}: {' or '.join(map(str, catalogue.QUANTIZERS[name].bits))}" for name in catalogue.packing())
        + ". The first is the default.",
        group=SECTION_KEPT,
        conflicts=(
            Refusal(
                "--kv-compressor spade", lambda args: _has_no_quantizer(args) and selection.is_spade(args),
                f"{KEEPS_TOKENS}, and selects with keys in {one_of(SCORE_BITS)} bits",
                "pass --kv-score-bits 8 or 4 instead, or --kv-compressor kivi",
            ),
            Refusal(
                "--kv-compressor {args.kv_compressor}", lambda args: _has_no_quantizer(args) and catalogue.points(args.kv_compressor),
                KEEPS_TOKENS, "pass --kv-compressor kivi",
            ),
            Refusal(
                "--kv-compressor {args.kv_compressor}", _has_no_quantizer,
                KEEPS_TOKENS, "add a packing method: --kv-compressor {args.kv_compressor}+kivi",
            ),
        ),
    ),
    "kv_partition": Flag(
        text="Size of a quantization group for integer attention: channels of a key, tokens of a value. "
        + "; ".join(f"{name}: {', '.join(map(str, catalogue.QUANTIZERS[name].partitions))}" for name in catalogue.partitioned())
        + ". The first is the default. Smaller groups are more precise, and take more memory.",
        group=SECTION_KEPT,
        conflicts=(
            Refusal(
                "--kv-compressor {args.kv_compressor}", _has_no_quantizer, KEEPS_TOKENS, f"pass --kv-compressor {catalogue.partitioned()[0]}"
            ),
        ),
    ),
    "kv_prefill": Flag(
        text="KV that prefill attention reads. exact: exact keys and values, except for a cached prefix of which only quantized KV is "
        "left. quantized (--kv-mode lossy, --kv-compressor hack): quantized blocks; a token's own block is exact. quantized applies to "
        "all prompts: also below --kv-sparse-from, with other methods, and of requests that decode on full KV.",
        group=SECTION_KEPT, values=options.PREFILL_MODES, conflicts=combinations.PREFILL_CONFLICTS,
    ),
    "kv_head_budgets": Flag(
        text=f"equal: all heads keep the same number of tokens. adaptive: the most important tokens over all heads and layers are kept, "
        f"with {COMPARABLE}. auto: adaptive for {' and '.join(catalogue.better_uneven())} (1.5 times the tokens per verification); equal for "
        "other methods, with several methods, and in deterministic mode on a GPU.",
        group=SECTION_KEPT, values=("auto", "equal", "adaptive"),
        conflicts=(
            Refusal(
                "--kv-more-compressors {args.kv_more_compressors}", lambda args: len(method_options.offered_methods(args)) > 1,
                "if heads keep different numbers of tokens, all requests must use one method", "leave --kv-more-compressors out",
                value="adaptive",
            ),
            Refusal(
                "--kv-compressor {args.kv_compressor}", lambda args: not _has_no_quantizer(args), "packed heads keep equal numbers of tokens",
                f"pass one of {COMPARABLE}", value="adaptive",
            ),
            Refusal(
                "--kv-compressor {args.kv_compressor}", lambda args: not method_options.drop_methods(args) <= set(catalogue.comparable()),
                "its scores do not compare over heads", f"pass one of {COMPARABLE}", value="adaptive",
            ),
        ),
    ),
    "kv_more_compressors": Flag(
        text="More methods that requests may ask for by name, in custom_params: NAME or NAME:BUDGET, separated by commas, as in "
        "snapkv:0.125,kivi. At most one of all methods may pack tokens.",
        group=SECTION_KEPT,
    ),
    "kv_scores": Flag(
        text="Folder of documents' scores, written by python -m sglang_ext.precompress, for --kv-compressor kvzip.",
        group=SECTION_KEPT,
    ),
    "kv_predictor": Flag(
        text="Folder of a network fitted to the model, written by python -m sglang_ext.fit kvzap, for --kv-compressor kvzap.",
        group=SECTION_KEPT,
    ),
    "kv_online_compressor": Flag(
        text="With kvzip: the method for contexts that begin with none of the documents, and for tokens after a document. With kvzap: "
        "the method for contexts whose KV is loaded from host memory.",
        group=SECTION_KEPT, values=catalogue.online(), requires=(HAS_ONLINE_METHOD, NEEDS_ONLINE_METHOD),
    ),
    "kv_select": Flag(
        text="Tokens of the context that each KV head reads in a step, as a share or as a number. Shorter contexts are read whole. The "
        "first 4 and the newest 32 tokens are always included. On a GPU quest rounds all of these up to pages of 16, and needs "
        "--page-size 16. Default: the share of --kv-budget.",
        group=SECTION_SELECTED, example="0.125 or 2048",
        values=(Range(0, 1, excludes_minimum=True, integers_only=False), Range(2, unit="tokens", accepts_float_type=True)),
        requires=(HAS_SELECTOR, SELECTS_FEWER_THAN_ALL),
    ),
    "kv_select_every": Flag(
        text="Steps between two selections of tokens. With --kv-mode verified and without cache ranks, tokens are also selected after each "
        "verification. Cache ranks on GPUs select less often if they need longer for all requests. auto: the fastest interval by measured times and "
        "acceptance, with spade and --kv-mode verified without cache ranks; else 1.",
        group=SECTION_SELECTED, values=(Range(1, unit="steps"), "auto"), example=4, requires=(HAS_SELECTOR,),
    ),
    "kv_select_by": Flag(
        text="Query used to select tokens before the step computes its query. current: the query of the previous step. regressed: a "
        "prediction from the last 17 queries.",
        group=SECTION_SELECTED, values=tuple(PREDICTORS), requires=(IS_SPADE,),
    ),
    "kv_cache_ranks": Flag(
        text="Number of processes that hold the keys of long requests and select tokens while the model computes. Requests are "
        "distributed among them. With a model on a GPU, each has a GPU of its own. In mode lossy they also hold values and send the "
        "selected rows, and full KV is freed. 0: the server selects: between steps (CPU), or on a second stream (GPU).",
        group=SECTION_SELECTED, values=(Range(0),), example=1, requires=(IS_SPADE, IS_NOT_PREFILL_SERVER),
        conflicts=(
            Refusal(
                "--tp-size {args.tp_size}", lambda args: selection.is_spade(args) and args.tp_size > 1,
                "the selections that arrive in time could differ between ranks, which must make equal decisions", "pass --tp-size 1",
            ),
            Refusal(
                "--device {args.device}", lambda args: selection.num_cache_ranks(args) > 0 and args.device not in ("cpu", "cuda"),
                "cache ranks work on a CPU or on NVIDIA GPUs", "pass --device cpu", needs_device=True,
            ),
        ),
    ),
    "kv_cache_rank_gpu": Flag(
        text="With a model on a GPU: the GPU of the first cache rank. The others use the next ones. Run nothing else there: a kernel "
        "waits on it for the queries of each step. Default: the GPU after the model's.",
        group=SECTION_SELECTED, values=(Range(0),), example=1, requires=(IS_SPADE, HAS_RANKS, IS_NOT_PREFILL_SERVER),
        conflicts=(
            Refusal(
                "--device {args.device}", lambda args: selection.num_cache_ranks(args) > 0 and not selection.has_gpu_ranks(args),
                "cache ranks are on GPUs only if the model is", "pass --device cuda", needs_device=True,
            ),
        ),
    ),
    "kv_pack_layers": Flag(
        text="Layers whose queries are sent to a cache rank together. Fewer are used if they divide the model's layers more evenly: 12 "
        "becomes 10 in a model of 30 layers. auto: 4 to 12, by the times of messages and of selection.",
        group=SECTION_SELECTED, values=(Range(1, unit="layers"), "auto"), example=6, requires=(IS_SPADE, HAS_RANKS, IS_NOT_PREFILL_SERVER),
        conflicts=(
            Refusal(
                "--kv-cache-ranks on GPUs", selection.has_gpu_ranks, "all layers of a step are sent at once", "pass auto", needs_device=True
            ),
        ),
    ),
    "kv_cache_rank_gb": Flag(
        text="Memory of each cache rank, in GB of 10^9 bytes, for keys with --kv-score-bits; in mode lossy also for exact keys and "
        "values. Requests without space are read whole. Default: by the size of SGLang's pool and the free memory.",
        group=SECTION_SELECTED, values=(Range(0, unit="GB", excludes_minimum=True, integers_only=False),), example=8,
        requires=(IS_SPADE, HAS_RANKS, IS_NOT_PREFILL_SERVER),
    ),
    "kv_score_bits": Flag(
        text="Bits of the keys with which tokens are selected. 16: the keys of the pool. 8, 4: integers with a scale for each token, "
        "head and 32 channels, 9 and 5 bits in total. Outputs in mode lossy depend on it. Default: 8 for cache ranks on GPUs, else 16.",
        group=SECTION_SELECTED, values=SCORE_BITS, requires=(IS_SPADE, IS_NOT_PREFILL_SERVER),
        conflicts=(
            Refusal(
                "--disaggregation-mode decode", lambda args: args.disaggregation_mode == "decode" and selection.slot_code_bits(args) > 0,
                "keys from another server would not be quantized, because forwards do that",
                f"pass --kv-score-bits {EXACT}, or --kv-cache-ranks 1, which quantizes them",
            ),
        ),
    ),
    "kv_draft_length": Flag(
        text="Tokens drafted on compressed KV before each verification. auto: the fastest length by measured acceptance and times, "
        "without drafts if full KV is faster.",
        group=SECTION_DRAFTS, values=(Range(1, options.MAX_DRAFT_LENGTH), "auto"), example=15, requires=(IS_VERIFIED,),
    ),
    "kv_max_burst": Flag(
        text="Maximum number of tokens that a request gets at once. Limits the draft length, for an even stream. A round gives at least "
        "a draft and the bonus token.",
        group=SECTION_DRAFTS, values=(Range(2, unit="tokens"),), requires=(IS_VERIFIED, BURST_LIMITS_ROUND),
    ),
    "kv_stream_pacing": Flag(
        text="When the tokens of a round are sent in a stream, each as a separate chunk. burst: all at once. even: spread over the "
        "expected time of the next round, so at most one round later. A request may override it with kv_stream_pacing in "
        "custom_params.",
        group=SECTION_STREAMS, values=request_params.PACINGS,
    ),
    "kv_host_gb": Flag(
        text="Host memory of each tensor-parallel rank, in GB of 10^9 bytes, for full KV of prefixes that do not fit the device. It is "
        "loaded, and its checksums compared, when a prompt begins with such a prefix. With --kv-compressor lynx alone and --page-size "
        "64, a load of packed tokens only transfers the residual of the compressed KV on the device: 7 bits per bfloat16 number. 0: "
        "none. In mode full it replaces SGLang's prefix tree, and decoding stays SGLang's.",
        group=SECTION_HOST, values=(Range(0, unit="GB", integers_only=False),), example=16, scope=ANY_MODE,
        conflicts=(
            Refusal(
                "--disaggregation-mode decode", lambda args: args.disaggregation_mode == "decode",
                "a server that only decodes keeps no prefixes, and only nodes of the prefix tree can leave the device",
                "pass it to the prefill server",
            ),
            refuse_if_set("disable_radix_cache", "only nodes of the prefix tree can leave the device", "leave out --disable-radix-cache"),
        ),
    ),
    "kv_store": Flag(
        text="URL of a prefix store that servers share: file:FOLDER, tcp://ADDRESS:PORT, redis://HOST:PORT/DATABASE, "
        "s3://BUCKET/PREFIX?endpoint=URL or mooncake://MASTER:PORT. Full KV of prompts and answers is written to it from host memory. A "
        "prompt that begins with a stored prefix reads it, if that is faster than computing it. Servers of all modes share a store. Needs --kv-host-gb.",
        group=SECTION_HOST, example="file:/mnt/prefixes", scope=ANY_MODE,
        conflicts=(
            Refusal(
                "--disaggregation-mode decode", lambda args: args.disaggregation_mode == "decode",
                "a server that only decodes computes no prompts, and keeps no prefixes", "pass it to the prefill server",
            ),
            Refusal("--kv-host-gb 0", lambda args: not args.kv_host_gb, "pages are written from host memory, and read into it", "pass --kv-host-gb 16"),
            Refusal(
                "--kv-prefill quantized", lambda args: args.kv_mode != "full" and args.kv_prefill == options.QUANTIZED,
                "prompts attend to quantized KV, so their KV is not that of other servers", "pass --kv-prefill exact",
            ),
        ),
    ),
    "kv_store_form": Flag(
        text="Form of the pages that are written to --kv-store. raw: unchanged. anchored: a 4-bit anchor and the remaining bits, .7 of the "
        "bytes of bfloat16. A core encodes about 70 MB and decodes about 130 MB of KV per second, so this is for links below 0.35 Gbit/s for "
        "each core. Servers share pages of one form only.",
        group=SECTION_HOST, values=("raw", "anchored"), scope=ANY_MODE, requires=(HAS_STORE,),
    ),
    "kv_full_tier": Flag(
        text="Where full KV of running requests is stored. device: on the device. host: in host memory, loaded for each verification. "
        "auto: on the device; in host memory if it does not fit and measured times predict a gain.",
        group=SECTION_HOST, values=options.FULL_TIERS, requires=(HAS_NO_OFFLOAD_OBSTACLE,),
        conflicts=(
            Refusal(
                "--disaggregation-mode prefill", lambda args: args.disaggregation_mode == "prefill",
                "a server that only prefills has no running requests whose full KV could leave the device", "pass --kv-full-tier device",
            ),
            *(dataclasses.replace(each, value="host") for each in options.OFFLOAD_OBSTACLES),
        ),
    ),
    "kv_offload_draft_length": Flag(
        text="Maximum number of drafts before a verification that loads full KV from the host. It is rounded down to whole rounds of "
        "--kv-draft-length.",
        group=SECTION_HOST, values=(Range(1, options.MAX_OFFLOAD_DRAFT_LENGTH),), example=64, requires=(IS_VERIFIED, CAN_OFFLOAD_FULL_KV),
    ),
    "kv_reference": Flag(
        text="KV that the decode server receives, and verifies drafts with. exact: the prefill server's KV, bit for bit, sent as a 4-bit "
        "anchor (5 bits with scales), then the remaining bits. int8: 8 bits, sent as the same anchor, then 4 bits. raw: unchanged, in one "
        "piece. Both servers must use the same.",
        group=SECTION_TRANSFER, values=disaggregation_options.REFERENCES, scope=HAS_PROGRESSIVE_TRANSFER,
    ),
    "kv_link_gbps": Flag(
        text="Maximum Gbit/s (10^9 bits) that the prefill server sends from one host to all decode servers together. Its ranks share it "
        "equally. Default: no limit.",
        group=SECTION_TRANSFER, values=(Range(0.01, unit="Gbit/s", integers_only=False),), example=100, scope=HAS_PROGRESSIVE_TRANSFER,
        requires=(IS_PREFILL_SERVER,),
    ),
    "kv_link_keys": Flag(
        text="File of the CURVE keys that both servers hold, mode 600. With it they may be on different machines. Written by python -m "
        "sglang_ext.link_keys FILE.",
        group=SECTION_TRANSFER, scope=HAS_PROGRESSIVE_TRANSFER,
    ),
    "kv_bench_acceptance": Flag(
        text="For benchmarks: outputs are useless. Each draft is accepted with this probability if all previous ones were, whatever "
        "verification finds. So speed can be measured without trained weights.",
        group=SECTION_BENCH, values=(request_params.PROBABILITY,), example=0.9, conflicts=(ONLY_VERIFIED,),
        warning="drafts are accepted by chance, so answers are of no use",
    ),
    "kv_bench_corrupt_loads": Flag(
        text="For tests: corrupt one page of full KV in host memory every N loads. Checksums detect it, and the KV is recomputed. "
        "Outputs stay correct, but speed is meaningless.",
        group=SECTION_BENCH, values=(Range(1, unit="loads per corrupted page"),), example=7,
        conflicts=(
            ONLY_VERIFIED,
            Refusal("--kv-host-gb 0", lambda args: not args.kv_host_gb, "nothing is loaded", "pass --kv-host-gb with a number of GB"),
        ),
        warning="host memory loses bits on purpose; outputs stay correct, and some KV is recomputed",
    ),
    "kv_bench_codec": Flag(
        text="For benchmarks: outputs are useless. KV is sent in one piece, with a codec for comparison in place of --kv-reference's. "
        "MODULE:CLASS, for example sglang_ext_bench.baselines.quantized_codec:Int8Codec. Both servers must use the same.",
        group=SECTION_BENCH, scope=HAS_PROGRESSIVE_TRANSFER, warning="KV arrives as a lossy codec leaves it, so answers are of no use",
        conflicts=(
            Refusal(
                "--kv-mode lossy --kv-compressor {args.kv_compressor}",
                lambda args: args.kv_mode == "lossy" and disaggregation_options.packs_all(args) is not None,
                "prompts are transferred as quantized KV with a method that packs all tokens, which the codec would replace",
                "use --kv-mode verified on both servers",
            ),
        ),
    ),
    "kv_bench_timeline": Flag(
        text=f"For benchmarks. With {BACKEND_OPTION}: file to which rank 0 appends, as JSON lines, when the KV of each bootstrap_room was "
        "computed, sent and received, and when its tokens were drafted and verified. With --kv-cache-ranks: when each step reached "
        "each pack of layers, and when its tokens were requested, selected and written.",
        group=SECTION_BENCH, scope=HAS_TIMELINE, warning="the times of requests' KV and drafts are written to that file",
        conflicts=(
            Refusal(
                "--kv-cache-ranks on GPUs", selection.has_gpu_ranks, "such times are not known for a device",
                "pass --kv-cache-ranks 0", needs_device=True,
            ),
        ),
    ),
}
"""The flags by the names of their fields."""

FLAGS: tuple[Flag, ...] = tuple(
    dataclasses.replace(flag, name=name, default=getattr(KVServerArgs, name)) for name, flag in TABLE.items()
)
"""The entries of the table, with names and defaults."""
