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

from sglang_ext import command_line
from sglang_ext.config import benchmark_options, disaggregation_options, options, stream_options
from sglang_ext.config.prefill_options import EXACT, PREFILL_MODES
from sglang_ext.core import RADIX_CACHE_BACKEND, SCORE_BITS, SPECULATIVE_ALGORITHM, HookError, OptionError
from sglang_ext.mem_cache.compressors import catalogue
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
            help="full: stock SGLang. verified: draft on compressed KV and verify on full KV, with the outputs of full. lossy: decode "
            "on compressed KV alone.",
            choices=list(options.MODES),
        ),
        NS("memory"),
    ] = "full"
    kv_compressor: A[
        str,
        f"How the KV cache is compressed: by dropping tokens ({', '.join(catalogue.dropping())}), by packing them in few bits "
        f"({', '.join(catalogue.packing())}), or both, as in {catalogue.DEFAULT}+kivi. Or a class of your own, in a file or in an "
        "installed module: ./my_method.py:KeyNorm, package.module:KeyNorm. "
        f"On a CPU only: {', '.join(sorted(set(catalogue.packing()) - set(catalogue.on_gpu())))}.",
        NS("memory"),
    ] = "snapkv"
    kv_more_compressors: A[
        str | None,
        "More methods that requests may ask for by name, in custom_params: NAME or NAME:BUDGET, separated by commas, as in "
        "snapkv:0.125,kivi. At most one of all methods may pack tokens.",
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
            help="With --kv-compressor kvzip: the method for contexts that begin with none of the documents, and for tokens after a "
            "document. With kvzap: the method for contexts whose KV is loaded from host memory (--kv-host-gb).",
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
            help="With --kv-mode lossy and --kv-compressor hack: what prompts attend to. exact: exact keys and values, except for a "
            "cached prefix of which only quantized KV is left. quantized: the quantized KV that compressed KV holds, except within a "
            "token's own block. It applies to all prompts: also below --kv-sparse-from, with other methods, and of requests that decode "
            "on full KV.",
            choices=list(PREFILL_MODES),
        ),
        NS("memory"),
    ] = EXACT
    kv_budget: A[
        float | None,
        f"Share of the context's tokens that compressed KV keeps, above 0 and at most 1. Default: {options.DEFAULT_BUDGET}, or 1 if "
        "tokens are only packed.",
        NS("memory"),
    ] = None
    kv_sparse_from: A[
        int,
        "Context length, in tokens, from which KV is compressed. Shorter contexts are read whole. It is the start of drafts with "
        f"--kv-mode verified, and of approximation with lossy. At least {options.MIN_CONTEXT}: below, compression saves too little.",
        NS("memory"),
    ] = options.MIN_CONTEXT
    kv_select: A[
        float | None,
        f"With --kv-compressor {SELECTOR_NAMES}: tokens of the context that each KV head reads in a step, as a share, above 0 and at "
        "most 1, or as a number. Shorter contexts are read whole. The first 4 and the newest 32 tokens are always included. On a GPU "
        "quest rounds all of these up to pages of 16, and needs --page-size 16. Default: the share of --kv-budget.",
        NS("memory"),
    ] = None
    kv_select_every: A[
        int | str,
        Arg(
            help=f"With --kv-compressor {SELECTOR_NAMES}: steps between two selections of tokens, from 1. With --kv-mode verified, "
            "tokens are also selected after each verification. Cache ranks on GPUs select less often if they need longer for all "
            "requests. auto: the fastest interval by measured times and acceptance, with spade and --kv-mode verified without cache "
            "ranks; else 1.",
            type_parser=options.parse_int_or_word,
        ),
        NS("memory"),
    ] = "auto"
    kv_select_by: A[
        str,
        Arg(
            help="With --kv-compressor spade: the query that selects tokens before a step has its own. current: the query of the "
            "previous step. regressed: a prediction from the last 17 queries.",
            choices=list(PREDICTORS),
        ),
        NS("memory"),
    ] = "current"
    kv_cache_ranks: A[
        int,
        "With --kv-compressor spade: number of processes that hold the keys of long requests and select tokens while the model "
        "computes. Requests are distributed among them. With a model on a GPU, each has a GPU of its own. In mode lossy they also hold "
        "values and send the selected rows, and full KV is freed. 0: tokens are selected between steps, which wait for it, or on a "
        "second stream of the GPU.",
        NS("memory"),
    ] = 0
    kv_cache_rank_gpu: A[
        int | None,
        "With --kv-cache-ranks and a model on a GPU: the GPU of the first cache rank, from 0. The others use the next ones. Run nothing "
        "else there: a kernel waits on it for the queries of each step. Default: the GPU after the model's.",
        NS("memory"),
    ] = None
    kv_pack_layers: A[
        int | str,
        Arg(
            help="With --kv-cache-ranks: layers whose queries are sent to a cache rank together, from 1. Fewer are used if they divide "
            "the model's layers more evenly: 12 becomes 10 in a model of 30 layers. auto: 4 to 12, by the times of messages and of "
            "selection.",
            type_parser=options.parse_int_or_word,
        ),
        NS("memory"),
    ] = "auto"
    kv_cache_rank_gb: A[
        float | None,
        "With --kv-cache-ranks: memory of each cache rank, in GB of 10^9 bytes, for keys in the format of --kv-score-bits. If it sends "
        "rows, as in mode lossy, also for exact keys and values. It is allocated when needed, on a GPU at once. Requests without space "
        "are read whole. Default: the size of the keys of SGLang's pool. In mode lossy the size of the contexts whose compressed KV "
        "fits the pool. The default uses at most half of the memory that is free at start, on a GPU of its own nine tenths.",
        NS("memory"),
    ] = None
    kv_score_bits: A[
        int | None,
        Arg(
            help="Bits of the keys with which --kv-compressor spade selects tokens. 16: the keys of the pool. 8, 4: integers with a "
            "scale for each token, head and 32 channels, 9 and 5 bits in total. They are stored beside the pool, which is smaller by "
            "their size, and selection reads fewer bytes. With --kv-cache-ranks the ranks store them, and --kv-cache-rank-gb holds more "
            "tokens. In mode lossy ranks also hold exact keys to send: they hold .78 and .86 of the tokens that they hold with 16. "
            "Default: 8 for cache ranks on GPUs, which then select for some layers in less time than the model computes them, else 16. "
            "Outputs in mode lossy depend on it.",
            choices=list(SCORE_BITS),
        ),
        NS("memory"),
    ] = None
    kv_head_budgets: A[
        str,
        "equal: all heads keep the same number of tokens. adaptive: the most important tokens over all heads and layers are kept, with "
        f"{', '.join(catalogue.comparable())}. auto: adaptive for {', '.join(catalogue.better_uneven())}, which then gain half as many "
        "tokens again per verification. auto: equal for other methods, with several methods, and in deterministic mode on a GPU.",
        NS("memory"),
    ] = "auto"
    kv_draft_length: A[
        int | str,
        Arg(
            help=f"Tokens drafted on compressed KV before each verification, from 1 to {options.MAX_DRAFT_LENGTH}. auto: the fastest "
            "length by measured acceptance and times, without drafts if full KV is faster.",
            type_parser=options.parse_int_or_word,
        ),
        NS("memory"),
    ] = "auto"
    kv_max_burst: A[
        int | None,
        "Maximum number of tokens that a request gets at once, from 2. Limits the draft length, for an even stream.",
        NS("memory"),
    ] = None
    kv_stream_pacing: A[
        str,
        Arg(
            help="When the tokens of a round are sent in a stream, each as a separate chunk. burst: all at once. even: spread over the "
            "expected time of the next round, so at most one round later. A request may override it with kv_stream_pacing in "
            "custom_params.",
            choices=list(stream_options.PACINGS),
        ),
        NS("memory"),
    ] = stream_options.BURST
    kv_host_gb: A[
        float,
        "Host memory of each tensor-parallel rank, in GB of 10^9 bytes, for full KV of prefixes that do not fit the device. It is "
        "loaded, and its checksums compared, when a prompt begins with such a prefix. With --kv-compressor lynx alone and --page-size "
        "64, a load of packed tokens only transfers the residual of the compressed KV on the device: 7 bits per bfloat16 number. 0: "
        "none.",
        NS("memory"),
    ] = 0.0
    kv_full_tier: A[
        str,
        Arg(
            help="Where full KV of running requests is stored. device: on the device. host: in host memory (--kv-host-gb), loaded for "
            "each verification. auto: on the device while it fits.",
            choices=list(options.FULL_TIERS),
        ),
        NS("memory"),
    ] = "device"
    kv_offload_draft_length: A[
        int,
        "Maximum number of drafts before a verification that loads full KV from the host. It is rounded down to whole rounds of "
        "--kv-draft-length.",
        NS("memory"),
    ] = 64
    kv_bench_acceptance: A[
        float | None,
        "For benchmarks: outputs are useless. Each draft is accepted with this probability, 0 to 1, if all previous ones were, whatever "
        "verification finds. So speed can be measured without trained weights.",
        NS("memory"),
    ] = None
    kv_bench_corrupt_loads: A[
        int | None,
        "For tests: full KV in host memory (--kv-host-gb) is corrupted before every so many loads, from 1. Checksums detect it, and the "
        "KV is recomputed: outputs stay correct, but speed is meaningless.",
        NS("memory"),
    ] = None
    kv_reference: A[
        str,
        Arg(
            help="With --disaggregation-transfer-backend progressive: the KV that arrives at the decode server, and is verified "
            "against. exact: the prefill server's KV, bit for bit, as 4 bits of each number and then the rest. int8: as 4 bits and then "
            "4 more. raw: unchanged, in one piece. Both servers must use the same.",
            choices=list(disaggregation_options.REFERENCES),
        ),
        NS("memory"),
    ] = "exact"
    kv_link_gbps: A[
        float | None,
        "With --disaggregation-transfer-backend progressive: maximum Gbit/s (10^9 bits) that the prefill server sends from one host to "
        "all decode servers together, from 0.01. Its ranks share it equally. Default: no limit.",
        NS("memory"),
    ] = None
    kv_link_keys: A[
        str | None,
        "With --disaggregation-transfer-backend progressive: file of the CURVE keys that both servers hold, mode 600. With it they may "
        "be on different machines. Written by python -m sglang_ext.link_keys FILE.",
        NS("memory"),
    ] = None

    kv_bench_codec: A[
        str | None,
        "For benchmarks: outputs are useless. With --disaggregation-transfer-backend progressive: KV is sent in one piece, with a codec "
        "for comparison in place of --kv-reference's. MODULE:CLASS, for example sglang_ext_bench.baselines.quantized_codec:Int8Codec. "
        "Both servers must use the same.",
        NS("memory"),
    ] = None
    kv_bench_timeline: A[
        str | None,
        "For benchmarks. With --disaggregation-transfer-backend progressive: file to which rank 0 appends, as JSON lines, when the KV "
        "of each bootstrap_room was computed, sent and received, and when its tokens were drafted and verified. With --kv-cache-ranks: "
        "when each step reached each pack of layers, and when its tokens were requested, selected and written.",
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
        # SGLang's other processes get the checked arguments, and do not need the checks.
        from sglang_ext import flag_checks

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
            from sglang_ext.config import model_folder

            raise model_folder.unreadable_model(self.model_path, error) from error
        if self.model_path.lower() in ("none", "dummy"):
            return
        flag_checks.check_resolved(self)
        from sglang_ext.hooks import activation as hooking

        hooking.activate_frontend(self.kv_mode)

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
        from sglang_ext.config import refused_options

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
