"""Compare two forwards with one mixed forward, on a CPU.

    OMP_NUM_THREADS=1 sglang-ext-bench two-forwards --model MODEL
    OMP_NUM_THREADS=1 sglang-ext-bench two-forwards --model MODEL --rounds --repeats 10

In a batch, some requests are verified with 16 tokens each, and the others run a draft step of one token. The plugin runs two forwards: one
of all draft steps, one of all verifications. A mixed forward could do both. The command prints the time of two forwards over that of the
mixed one. With --rounds it compares whole rounds, in which each request drafts and is verified once. One way verifies all requests
together after the draft steps, the other verifies one request in each of several mixed forwards. The ratio is the first over the second.

The model runs in PyTorch with the attention of a server on a CPU. The KV pool holds random numbers. Both ways alternate. A ratio is that of
the medians of the process's CPU time, so that other processes hardly change it on one thread.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from sglang_ext.config.model_folder import read_config
from sglang_ext.layers.attention.torch_native import RaggedTorchNativeBackend
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.options import add_list, add_sizes, check_sizes
from sglang_ext_bench.options import check_counts

ATTENTION_NAME = "slots"
SIZES = {
    "requests": (8, "requests of the batch"), "width": (16, "tokens of a verification"),
    "repeats": (15, "measurements, whose median is used"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model")
    add_list(parser, "--verified", (1, 2), "verified requests among them", type=int)
    add_list(parser, "--context", (512, 2048), "earlier tokens of each request", type=int)
    add_sizes(parser, SIZES)
    add("--rounds", action="store_true", help="compare whole rounds, with as many draft steps as a verification has tokens")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Print a line for each context and number of verified requests.

    Raises:
        CommandError: An option is out of range.
        OptionError: The model's folder has no config.json.
    """
    check_sizes(args, SIZES)
    check_counts({"--verified": min(args.verified), "--context": min(args.context)})
    if not args.rounds and max(args.verified) >= args.requests:
        raise CommandError(f"--verified {max(args.verified)}: pass fewer than --requests {args.requests}, so that some run a draft step")
    if args.rounds and args.requests > args.width + 1:
        raise CommandError(f"--requests {args.requests}: with --rounds pass at most --width {args.width} and 1 more")
    read_config(args.model)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    for context in args.context:
        pool = SlotPool(model, args.requests, context + args.width)
        AttentionInterface.register(ATTENTION_NAME, pool.attend)
        model.set_attn_implementation(ATTENTION_NAME)
        if args.rounds:
            found = time_ratio(model, pool, *rounds(args, context), args.repeats)
            print(f"{args.requests} requests of {context} tokens: a round {found:.2f} of one with mixed forwards", flush=True)
            continue
        for verified in args.verified:
            both_ways = mixed_and_separate(args, context, verified)
            logits = [torch.cat([forward(model, pool, part) for part in parts]) for parts in both_ways]
            torch.testing.assert_close(*logits, atol=1e-2, rtol=1e-3)
            found = time_ratio(model, pool, *both_ways, args.repeats)
            print(f"{args.requests} requests of {context} tokens, {verified} verified: two forwards {found:.2f} of a mixed one", flush=True)
    return 0


@dataclass(frozen=True)
class ForwardPart:
    """A forward of some requests.

    Attributes:
        rows: Rows of the slot table, int64 [requests].
        counts: New tokens of each request, int64 [requests].
        context: Earlier tokens of each request.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    context: int


class SlotPool:
    """A pool of random KV in scattered slots, and the attention of a forward over it.

    Args:
        model: The model.
        requests: Requests of the batch.
        tokens: Slots of each request.

    Attributes:
        table: Slots of each request, int64 [requests, tokens].
        keys: Keys, float32 [layers, slots, kv_heads, head_dim].
        values: Values, like the keys.
    """

    def __init__(self, model: PreTrainedModel, requests: int, tokens: int) -> None:
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.table = torch.randperm(requests * tokens).view(requests, tokens)
        shape = config.num_hidden_layers, requests * tokens, config.num_key_value_heads, dim
        self.keys, self.values = torch.randn(shape), torch.randn(shape)
        # Only its attention is used, which needs no model runner.
        self._backend = object.__new__(RaggedTorchNativeBackend)
        self._part: ForwardPart | None = None

    @contextmanager
    def serving(self, part: ForwardPart) -> Iterator[None]:
        """Forwards inside this context are of these requests."""
        self._part = part
        yield
        self._part = None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Store the new KV and attend to all KV of each request. The signature is that of transformers.

        Args:
            module: The attention layer.
            query: [1, heads, tokens, head_dim].
            key: [1, kv_heads, tokens, head_dim].
            value: Like the key.
            attention_mask: Unused; attention is causal.
            scaling: Factor on query-key products.
            options: Unused.

        Returns:
            Outputs, [1, tokens, heads, head_dim], and no weights.
        """
        part, layer = self._part, module.layer_idx
        slots = torch.cat([self.table[row, part.context : part.context + count] for row, count in zip(part.rows, part.counts)])
        self.keys[layer][slots], self.values[layer][slots] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        queries = query[0].transpose(0, 1)
        before = torch.full_like(part.counts, part.context)
        inputs = queries, torch.empty_like(queries), self.keys[layer], self.values[layer], self.table, part.rows
        outputs = self._backend._run_sdpa_forward_extend(
            *inputs, before + part.counts, before, part.counts, scaling=scaling, enable_gqa=True, causal=True
        )
        return outputs[None], None


def forward(model: PreTrainedModel, pool: SlotPool, part: ForwardPart) -> torch.Tensor:
    """Run a forward. Returns the logits of its tokens, [tokens, vocabulary]."""
    positions = torch.cat([torch.arange(part.context, part.context + count) for count in part.counts])
    tokens = positions % model.config.vocab_size
    with pool.serving(part):
        return model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]


def time_ratio(
    model: PreTrainedModel, pool: SlotPool, before: Sequence[ForwardPart], after: Sequence[ForwardPart], repeats: int
) -> float:
    """Return the CPU time of the forwards ``after`` over that of the forwards ``before``: medians of ``repeats`` measurements."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for seconds, parts in zip(times, (before, after)):
            began = time.process_time()
            for part in parts:
                forward(model, pool, part)
            seconds.append(time.process_time() - began)
    # The first measurement is the warm-up.
    of_before, of_after = (statistics.median(seconds[1:]) for seconds in times)
    return of_after / of_before


def mixed_and_separate(args: argparse.Namespace, context: int, verified: int) -> tuple[list[ForwardPart], list[ForwardPart]]:
    """Return a mixed forward in which the last ``verified`` requests are verified, and two forwards of the same tokens."""
    rows = torch.arange(args.requests)
    counts = torch.where(rows < args.requests - verified, 1, args.width)
    separate = [ForwardPart(rows[part], counts[part], context) for part in (counts == 1, counts > 1)]
    return [ForwardPart(rows, counts, context)], separate


def rounds(args: argparse.Namespace, context: int) -> tuple[list[ForwardPart], list[ForwardPart]]:
    """Return the forwards of a round that verifies one request in each mixed forward, and of one that verifies all in the last forward."""
    rows = torch.arange(args.requests)
    step, verification = (ForwardPart(rows, torch.full_like(rows, count), context) for count in (1, args.width))
    (mixed,), _ = mixed_and_separate(args, context, 1)
    one_by_one = [mixed] * args.requests + [step] * (args.width + 1 - args.requests)
    return one_by_one, [step] * args.width + [verification]
