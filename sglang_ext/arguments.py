"""The flags of sglang-ext, as SGLang server arguments.

:class:`KVServerArgs` replaces ``sglang.srt.server_args.ServerArgs`` (plugin.py). So the flags are parsed, logged, shown by
``/server_info``, accepted by ``sgl.Engine(...)`` and pickled to the scheduler process like SGLang's own. The scheduler unpickles the
arguments before it loads plugins: this module must import without any hook in place.
"""

import argparse
import dataclasses
import logging

import torch
from sglang.srt.arg_groups.arg_utils import NS, A, Arg
from sglang.srt.server_args import ServerArgs

from sglang_ext import command_line, flag_checks
from sglang_ext.config import benchmark_options, disaggregation_options, model_folder, options, refused_options, stream_options
from sglang_ext.config.prefill_options import EXACT, PREFILL_MODES
from sglang_ext.core import RADIX_CACHE_BACKEND, SPECULATIVE_ALGORITHM, HookError, OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.selection.scoring_keys import SCORE_BITS
from sglang_ext.mem_cache.selection.predictors import PREDICTORS

logger = logging.getLogger(__name__)
SELECTOR_NAMES = " or ".join(catalogue.per_step_methods())


@dataclasses.dataclass
class KVServerArgs(ServerArgs):
    """SGLang's server arguments and the ``--kv-*`` flags.

    With ``kv_mode`` at its default, ``full``, nothing else of sglang-ext runs.

    Raises:
        OptionError: A flag is out of range, unknown or cannot be combined, or the model is not supported. The message names the value, the
            allowed values and the remedy.
    """

    kv_mode: A[
        str,
        Arg(
            help="full: stock SGLang. verified: draft on a compressed KV cache, verify on the full "
            "one; the answers are those of full. lossy: serve from the compressed KV cache alone.",
            choices=list(options.MODES),
        ),
        NS("memory"),
    ] = "full"
    kv_compressor: A[
        str,
        f"How the KV cache is compressed: by dropping tokens ({', '.join(catalogue.dropping())}), by packing them in few bits "
        f"({', '.join(catalogue.packing())}), or both, as in {catalogue.DEFAULT}+kivi. "
        f"Or a class of your own: ./my_method.py:KeyNorm. On a CPU alone: {', '.join(sorted(set(catalogue.packing()) - set(catalogue.on_gpu())))}.",
        NS("memory"),
    ] = "snapkv"
    kv_more_compressors: A[
        str | None,
        "Further methods that requests may ask for by name, in custom_params: NAME or NAME:BUDGET, with commas between, as in "
        "snapkv:0.125,kivi. Of all methods one at most may pack tokens.",
        NS("memory"),
    ] = None
    kv_scores: A[
        str | None,
        "Folder of documents' scores, written by python -m sglang_ext.precompress, for --kv-compressor kvzip.",
        NS("memory"),
    ] = None
    kv_predictor: A[
        str | None,
        "Folder of a network fitted to the model, written by python -m sglang_ext.fit kvzap, for --kv-compressor kvzap.",
        NS("memory"),
    ] = None
    kv_online_compressor: A[
        str,
        Arg(
            help="With --kv-compressor kvzip: how contexts are compressed that begin with none of the documents, and what "
            "follows one. With kvzap: those whose KV comes from host memory (--kv-host-gb).",
            choices=list(catalogue.online()),
        ),
        NS("memory"),
    ] = "snapkv"
    kv_bits: A[
        int | None,
        "Bits of a packed number: "
        + "; ".join(f"{name}: {' or '.join(map(str, catalogue.allowed_bits(name)))}" for name in catalogue.packing())
        + ". The first is the default.",
        NS("memory"),
    ] = None
    kv_partition: A[
        int | None,
        "Numbers that share a scale where codes are multiplied as integers, of a token's key and of a value's channel: "
        + "; ".join(f"{name}: {', '.join(map(str, catalogue.allowed_partitions(name)))}" for name in catalogue.partitioned())
        + ". The first is the default. Fewer are more precise, and take more room.",
        NS("memory"),
    ] = None
    kv_prefill: A[
        str,
        Arg(
            help="With --kv-mode lossy and --kv-compressor hack: what prompts attend to. exact: keys and values as they are, but for "
            "a cached beginning of which codes alone are left. quantized: the codes that copies hold, but for a token's own block, in all "
            "prompts: below --kv-sparse-from, by other methods and before answers on full KV, too.",
            choices=list(PREFILL_MODES),
        ),
        NS("memory"),
    ] = EXACT
    kv_budget: A[
        float | None,
        "Share of the context's tokens that the compressed view keeps, above 0 and at most 1. Default: "
        f"{options.DEFAULT_BUDGET}, or 1 where tokens are only packed.",
        NS("memory"),
    ] = None
    kv_sparse_from: A[
        int,
        "Tokens of a context from which on a request has a copy; shorter ones are read whole. With --kv-mode verified drafts begin there, "
        f"with lossy approximation does. From {options.MIN_CONTEXT}, where a copy begins to be worth it.",
        NS("memory"),
    ] = options.MIN_CONTEXT
    kv_select: A[
        float | None,
        f"With --kv-compressor {SELECTOR_NAMES}: tokens of the context that each KV head reads in a step, as their share, above 0 and "
        "at most 1, or as their number; contexts that have no more are read whole. The first 4 and the newest 32 are among them in any "
        "case. quest on a GPU rounds all of these up to pages of 16, and wants --page-size 16. Default: the share that --kv-budget says.",
        NS("memory"),
    ] = None
    kv_select_every: A[
        int | str,
        Arg(
            help=f"With --kv-compressor {SELECTOR_NAMES}: steps between two selections of tokens, from 1. With --kv-mode verified, tokens are also "
            "selected after each verification. Cache ranks on GPUs select less often if they need longer for all requests. auto: the fastest "
            "interval by measured times and acceptance, with spade and --kv-mode verified without cache ranks; else 1.",
            type_parser=options.parse_int_or_word,
        ),
        NS("memory"),
    ] = "auto"
    kv_select_by: A[
        str,
        Arg(
            help="With --kv-compressor spade: which query tokens are chosen by before a step has its own. current: that of the step "
            "before. regressed: what the last 17 let expect.",
            choices=list(PREDICTORS),
        ),
        NS("memory"),
    ] = "current"
    kv_cache_ranks: A[
        int,
        "With --kv-compressor spade: processes that hold the keys of long requests and choose tokens by them while the model computes. "
        "Each takes requests of its own. Beside a GPU each has a GPU of its own. In mode lossy they hold values, too, and send what is "
        "chosen: full KV is given back. 0: tokens are chosen between steps, which wait for "
        "it, or on a second stream of the GPU.",
        NS("memory"),
    ] = 0
    kv_cache_rank_gpu: A[
        int | None,
        "With --kv-cache-ranks beside a GPU: the GPU of the first cache rank, from 0; the others follow. Let nothing else run there: a "
        "kernel waits on it for the questions of each step. Default: the one after the model's.",
        NS("memory"),
    ] = None
    kv_pack_layers: A[
        int | str,
        Arg(
            help="With --kv-cache-ranks: layers whose queries go to a cache rank at once, from 1, fewer where the model's are divided more "
            "evenly so, as 30 by 12 in packs of 10; auto: 4 to 12, by how long messages and choosing take.",
            type_parser=options.parse_int_or_word,
        ),
        NS("memory"),
    ] = "auto"
    kv_cache_rank_gb: A[
        float | None,
        "With --kv-cache-ranks: memory of each cache rank for keys as --kv-score-bits has them, and where it sends rows, as in mode lossy, "
        "for exact keys and values, in GB of 10^9 bytes, taken as it is used, on a GPU at once. Requests for which there is no room are "
        "read whole. Default: as much as the keys of SGLang's pool take; in mode lossy what contexts take of which the pool holds the "
        "copies, but of the memory that is free at start no more than half, of a GPU's of its own nine tenths.",
        NS("memory"),
    ] = None
    kv_score_bits: A[
        int | None,
        Arg(
            help="Bits of the keys by which --kv-compressor spade chooses tokens. 16: those of the pool. 8, 4: integers of each token, "
            "head and 32 channels, of 9 and 5 bits with their scales. They lie beside the pool, which is as much smaller, and choices read "
            "as much less; with --kv-cache-ranks at the ranks, and --kv-cache-rank-gb holds as many more tokens, but in mode lossy, where "
            "exact keys are held beside these, to be sent: .78 and .86 of those of 16. Default: 8 for cache ranks beside a GPU, which so "
            "choose for some layers in less time than the model takes for them, else 16. Answers of mode lossy depend on it.",
            choices=list(SCORE_BITS),
        ),
        NS("memory"),
    ] = None
    kv_head_budgets: A[
        str,
        "equal: all heads keep the same number of tokens. adaptive: what matters most over all heads and layers, with "
        f"{', '.join(catalogue.comparable())}; auto: adaptive for {', '.join(catalogue.better_uneven())}, which give half as many "
        "tokens again a verification by it; equal for others, beside other methods, and in deterministic mode on a GPU.",
        NS("memory"),
    ] = "auto"
    kv_draft_length: A[
        int | str,
        Arg(
            help="Tokens drafted on the compressed view before each verification, from 1 to "
            f"{options.MAX_DRAFT_LENGTH}; auto: what measured acceptance and times make fastest, none where full "
            "KV is faster.",
            type_parser=options.parse_int_or_word,
        ),
        NS("memory"),
    ] = "auto"
    kv_max_burst: A[
        int | None,
        "Tokens that a request gets in one piece at most, from 2: caps the draft length, for an even stream.",
        NS("memory"),
    ] = None
    kv_stream_pacing: A[
        str,
        Arg(
            help="When the tokens of a round leave in a stream, each as a chunk of its own. burst: all at once. even: spread over the "
            "expected time of the next round, so at most one round later. A request may choose with kv_stream_pacing in custom_params.",
            choices=list(stream_options.PACINGS),
        ),
        NS("memory"),
    ] = stream_options.BURST
    kv_host_gb: A[
        float,
        "Host memory of each tensor-parallel rank, in GB of 10^9 bytes, for full KV of prefixes that the device has no room "
        "for; it comes back, its checksums compared, when a prompt begins with it. With --kv-compressor lynx alone and --page-size "
        "64, packed tokens come back by what their copies on the device lack: of bfloat16 by 7 bits a number. 0: none.",
        NS("memory"),
    ] = 0.0
    kv_full_tier: A[
        str,
        Arg(
            help="Where full KV of running requests lies. device: on the device. host: in host memory (--kv-host-gb), from "
            "where it is loaded for each verification. auto: on the device while it fits.",
            choices=list(options.FULL_TIERS),
        ),
        NS("memory"),
    ] = "device"
    kv_offload_draft_length: A[
        int,
        "Tokens drafted at most before a verification whose full KV has to be loaded from the host; rounded down to whole "
        "rounds of --kv-draft-length.",
        NS("memory"),
    ] = 64
    kv_bench_acceptance: A[
        float | None,
        "For benchmarks: answers are of no use. Each draft is accepted with this probability, 0 to 1, when those before it "
        "were, whatever verification finds, so that speed can be measured without trained weights.",
        NS("memory"),
    ] = None
    kv_bench_corrupt_loads: A[
        int | None,
        "For tests: full KV in host memory (--kv-host-gb) is changed before every so many loads, from 1. Checksums notice, and "
        "it is computed again: answers stay right, speed is of no use.",
        NS("memory"),
    ] = None
    kv_reference: A[
        str,
        Arg(
            help="With --disaggregation-transfer-backend progressive: what arrives at the decode server, and is verified against. exact: "
            "the prefill server's KV, bit for bit, as 4 bits of each number and then the rest. int8: as 4 bits and then 4 more. raw: "
            "as it is, in one piece. Both servers must name the same.",
            choices=list(disaggregation_options.REFERENCES),
        ),
        NS("memory"),
    ] = "exact"
    kv_link_gbps: A[
        float | None,
        "With --disaggregation-transfer-backend progressive: Gbit/s (10^9 bits) that the prefill server sends at most from one host, to "
        "all decode servers together, from 0.01. Its ranks share it equally. Default: no limit.",
        NS("memory"),
    ] = None
    kv_link_keys: A[
        str | None,
        "With --disaggregation-transfer-backend progressive: file of the CURVE keys that both servers hold, mode 600, which lets them "
        "be on different machines. Written by python -m sglang_ext.link_keys FILE.",
        NS("memory"),
    ] = None

    kv_bench_codec: A[
        str | None,
        Arg(
            help="For benchmarks: answers are of no use. With --disaggregation-transfer-backend progressive: KV travels in one piece, by a "
            "codec that is compared with --kv-reference's, which says nothing then. bf16: 16 bits; int8, int8-tensor: 8 bits, a scale for "
            "each token and head, or for each page of a layer; int4: 5 bits with scales; cachegen: differences of tokens, entropy "
            "coded; lynx-int8, lynx-int4: codes of exact's first 8 or 4 bits. Both servers must name the same.",
            choices=list(benchmark_options.CODECS),
        ),
        NS("memory"),
    ] = None
    kv_bench_timeline: A[
        str | None,
        "For benchmarks. With --disaggregation-transfer-backend progressive: file to which rank 0 appends, as JSON lines, when the "
        "KV of each bootstrap_room was computed, sent and received, and when its tokens were drafted and verified. With --kv-cache-ranks: "
        "when each step reached each pack of layers, and when its tokens were asked for, chosen and written.",
        NS("memory"),
    ] = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add SGLang's flags and ours. An error that names one of ours is one line."""
        # Called on this class by name, because SGLang's registry also puts it in the place of this module's ServerArgs.
        super(KVServerArgs, KVServerArgs).add_cli_args(parser)
        command_line.shorten_errors(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "KVServerArgs":
        """Create from a command line. A wrong flag or a taken port ends the process with one line and exit code 2.

        Raises:
            SystemExit: A flag is refused.
        """
        try:
            made = super().from_cli_args(args)
            if made.kv_mode != "full" and made.node_rank == 0:
                command_line.check_address(made.host, made.port)
            return made
        except (OptionError, HookError) as error:
            command_line.exit_if_refused(error)
            raise

    def __post_init__(self) -> None:
        """Check the flags, prepare SGLang's own options for the mode, then let SGLang resolve."""
        flag_checks.check_flags(self)
        if self.kv_mode == "full":
            super().__post_init__()
            return
        self._prepare_speculation()
        try:
            super().__post_init__()
        except OSError as error:
            # Errors of the operating system have a number. Those of Hugging Face's library, for a model that it does not find, have none.
            if error.errno is not None:
                raise
            raise model_folder.unreadable_model(self.model_path, error) from error
        if self.model_path.lower() in ("none", "dummy"):
            return
        flag_checks.check_resolved(self)
        from sglang_ext.hooks import activation as hooking

        hooking.activate_frontend()

    def check_lora_server_args(self) -> None:
        """SGLang's check. Of all speculative algorithms it allows LoRA with NGRAM only."""
        if self.speculative_algorithm != SPECULATIVE_ALGORITHM:
            super().check_lora_server_args()
            return
        # layers/forward.py:prepare_lora applies adapters to drafts and verifications alike.
        self.override("check_lora_server_args", speculative_algorithm=None)
        super().check_lora_server_args()
        self.override("check_lora_server_args", speculative_algorithm=SPECULATIVE_ALGORITHM)

    def _prepare_speculation(self) -> None:
        """Set SGLang's options for its own registries: speculative algorithm and radix cache backend."""
        on_gpu = self.device in (None, "cuda") and torch.cuda.is_available()
        refused_options.check_combinations(self)
        if self.kv_full_tier == "auto" and (obstacle := options.offload_obstacle(self)) is not None:
            logger.warning("sglang-ext: --kv-full-tier auto keeps all full KV on the device, as %s", obstacle)
        benchmark_options.warn(self)
        self.speculative_algorithm = SPECULATIVE_ALGORITHM
        self.speculative_num_steps = options.max_pending_drafts(self)
        self.speculative_eagle_topk = 1
        self.speculative_num_draft_tokens = self.speculative_num_steps + 1
        self.radix_cache_backend = RADIX_CACHE_BACKEND
        if self.enable_lora or self.lora_paths:
            # Adapters are prepared for each forward of a step or of a verification.
            self.disable_cuda_graph = True
        if self.attention_backend is None and on_gpu:
            self.attention_backend = "triton" if self.enable_deterministic_inference else "flashinfer"
        # Draft and verification share noise, which needs a sampler with a seed.
        self.sampling_backend = self.sampling_backend or "pytorch"
