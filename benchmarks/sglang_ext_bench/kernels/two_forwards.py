"""What two forwards cost on a CPU in the place of a mixed one: docs/benchmarks.md.

    OMP_NUM_THREADS=1 sglang-ext-bench two-forwards --model MODEL

Of a batch some requests are verified, 16 tokens each, while the others take a step of one token. One forward could do both; a round
of this package has one for the steps and one for the verification. With --rounds a whole round is compared, in which each request drafts
and is verified once: verifications one by one, in mixed forwards, or all in one after the steps.

The model is its own in PyTorch, with the attention that a CPU's server has (layers/attention/torch_native.py) over a pool of slots, which
holds noise. Both ways run in turn; a ratio is that of the medians of what each takes of the process's CPU time, so that on one thread
other processes disturb it little.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from sglang_ext.layers.attention.torch_native import RaggedTorchNativeBackend

NAME = "slots"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model")
    add("--requests", type=int, default=8)
    add("--verified", type=int, nargs="+", default=[1, 2], help="of them, requests that are verified")
    add("--width", type=int, default=16, help="tokens of a verification")
    add("--context", type=int, nargs="+", default=[512, 2048])
    add("--repeats", type=int, default=15)
    add("--rounds", action="store_true", help="whole rounds, of as many steps as a verification has tokens")
    return parser.parse_args()


@dataclass(frozen=True)
class Part:
    """A forward of some requests.

    Attributes:
        rows: of the table, int64 [requests].
        counts: tokens of each, int64 [requests].
        context: tokens that each has before.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    context: int


class Pool:
    """Slots of all requests in scattered order, and the attention of a forward over them.

    Attributes:
        table: int64 [requests, tokens], slots.
        keys, values: of each layer, float32 [slots, kv_heads, head_dim].
    """

    def __init__(self, model: PreTrainedModel, requests: int, tokens: int):
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.table = torch.randperm(requests * tokens).view(requests, tokens)
        shape = config.num_hidden_layers, requests * tokens, config.num_key_value_heads, dim
        self.keys, self.values = torch.randn(shape), torch.randn(shape)
        self._backend = object.__new__(RaggedTorchNativeBackend)  # its attention alone, without a server's runner
        self._part: Part | None = None

    @contextmanager
    def serving(self, part: Part) -> Iterator[None]:
        """Forwards of the block are of these requests."""
        self._part = part
        yield
        self._part = None

    def slots(self) -> torch.Tensor:
        """Where the KV of the forward's tokens lies, int64 [tokens]."""
        part = self._part
        return torch.cat([self.table[row, part.context : part.context + count] for row, count in zip(part.rows, part.counts)])

    def attend(self, module, query, key, value, attention_mask, scaling, **options) -> tuple[torch.Tensor, None]:
        """As of transformers: ``query`` [1, heads, tokens, head_dim]; gives [1, tokens, heads, head_dim]."""
        part, layer = self._part, module.layer_idx
        slots = self.slots()
        self.keys[layer][slots], self.values[layer][slots] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        queries = query[0].transpose(0, 1)
        before = torch.full_like(part.counts, part.context)
        shared = queries, torch.empty_like(queries), self.keys[layer], self.values[layer], self.table, part.rows
        found = self._backend._run_sdpa_forward_extend(
            *shared, before + part.counts, before, part.counts, scaling=scaling, enable_gqa=True, causal=True
        )
        return found[None], None


def forward(model: PreTrainedModel, pool: Pool, part: Part) -> torch.Tensor:
    """Logits of the part's tokens, [tokens, vocabulary]."""
    positions = torch.cat([torch.arange(part.context, part.context + count) for count in part.counts])
    tokens = positions % model.config.vocab_size
    with pool.serving(part):
        return model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]


def ratio(model: PreTrainedModel, pool: Pool, mixed: list[Part], apart: list[Part], repeats: int) -> float:
    """What some forwards take over what others do."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for seconds, parts in zip(took, (mixed, apart)):
            began = time.process_time()
            for part in parts:
                forward(model, pool, part)
            seconds.append(time.process_time() - began)
    before, after = (statistics.median(seconds[1:]) for seconds in took)
    return after / before


def mixed_and_apart(args: argparse.Namespace, context: int, verified: int) -> tuple[list[Part], list[Part]]:
    """One forward in which some requests are verified and the others take a step, and the same in two."""
    rows = torch.arange(args.requests)
    counts = torch.where(rows < args.requests - verified, 1, args.width)
    return [Part(rows, counts, context)], [Part(rows[some], counts[some], context) for some in (counts == 1, counts > 1)]


def rounds(args: argparse.Namespace, context: int) -> tuple[list[Part], list[Part]]:
    """As many forwards, with one request after the other verified beside the others' steps, and with all verified in the last."""
    every = torch.arange(args.requests)
    step, verification = (Part(every, torch.full_like(every, count), context) for count in (1, args.width))
    (mixed,), _ = mixed_and_apart(args, context, 1)
    one_by_one = [mixed] * args.requests + [step] * (args.width + 1 - args.requests)
    return one_by_one, [step] * args.width + [verification]


@torch.inference_mode()
def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    for context in args.context:
        pool = Pool(model, args.requests, context + args.width)
        AttentionInterface.register(NAME, pool.attend)
        model.set_attn_implementation(NAME)
        if args.rounds:
            found = ratio(model, pool, *rounds(args, context), args.repeats)
            print(f"{args.requests} requests of {context} tokens: a round {found:.2f} of one with mixed forwards", flush=True)
            continue
        for verified in args.verified:
            parts = mixed_and_apart(args, context, verified)
            logits = [torch.cat([forward(model, pool, part) for part in some]) for some in parts]
            torch.testing.assert_close(*logits, atol=1e-2, rtol=1e-3)
            found = ratio(model, pool, *parts, args.repeats)
            print(f"{args.requests} requests of {context} tokens, {verified} verified: two forwards {found:.2f} of a mixed one", flush=True)


if __name__ == "__main__":
    main()
