"""How many greedy drafts on packed copies full KV accepts, without a server: docs/benchmarks.md.

    sglang-ext-bench quantized-acceptance --model MODEL --prompts FOLDER [--limit PROMPTS] [--exact TOKENS...] [--kl] [METHODS...]

Rounds are those of kvzap_acceptance.py, on the plugin's packing and attention. Methods have the names of bench quality: kivi:2, or
"hack:2 --kv-partition 32". With --kl the answer is not drafted: each of its tokens is given, and what comes next compared with full KV's.
"""

from collections.abc import Iterable, Sequence

import torch
from sglang_ext_bench.acceptance.kvzap_acceptance import Context
from sglang_ext_bench.acceptance.on_prompts import load, parser_of, prompts_in
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.layers.attention.compressed.packed import packed_attention
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.rounding import token_seeds
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.catalogue import method
from sglang_ext_bench.quality.named_method import NamedMethod

NAME = "packed_copies"


class Drafting:
    """An attention function of transformers that reads packed blocks in the place of a prompt's first tokens.

    Attributes:
        packing: how they are packed; None to read full KV.
    """

    packing: Packing | None = None

    def pack(self, context: Context, name: str, first: int | None) -> None:
        """Pack the prompt's KV after its ``first`` tokens, None for the method's sinks; ``name`` as bench quality names it."""
        named, tokens = NamedMethod.parse(name), len(context.prompt)
        keys, values = (
            tuple(getattr(layer, kind)[0, :, :tokens].transpose(0, 1).contiguous() for layer in context.cache.layers)
            for kind in ("keys", "values")
        )
        buffers = KVBuffers(tuple(range(len(keys))), (1.0,) * len(keys), keys, values)
        rotary = Rotary(context.model.model.rotary_emb.inv_freq.float())
        packs = Packing.for_pool(method(named.compressor, named.bits, named.partition).quantizer, buffers, 1, rotary)
        first = packs.sinks if first is None else first
        count = (tokens - packs.recent - first) // packs.unit * packs.unit
        self.packed, self.held = range(first, first + count), packs.packed_slots(count)
        kept = torch.arange(first, first + count).expand(len(keys), keys[0].shape[1], -1)
        # Blocks of one layer fit where its tokens that they stand for lay: numbers are read before cells are written.
        seeds = token_seeds(context.prompt, tokens, kept.device) if packs.stochastic else None
        packs.write(buffers, kept, torch.arange(tokens), torch.arange(self.held), seeds)
        self.blocks = [(key[: self.held], value[: self.held]) for key, value in zip(keys, values)]
        self.packing = packs

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention of [1, heads, tokens, head_dim]."""
        if self.packing is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        whole = (part[0].transpose(0, 1) for part in (key, value))
        exact = (torch.cat([part[: self.packed.start], part[self.packed.stop :]]) for part in whole)
        keys, values = (torch.cat(parts) for parts in zip(self.blocks[module.layer_idx], exact))
        queries, row = query[0].transpose(0, 1), torch.arange(len(keys))
        return packed_attention(self.packing, queries, keys, values, row, self.held, module.scaling)[None], None


def accepted(context: Context, drafting: Drafting, name: str, first: int | None) -> tuple[int, int]:
    """Drafts that are accepted, and offered, over the whole answer; ``first`` as of :meth:`Drafting.pack`."""
    drafting.pack(context, name, first)
    context.model.set_attn_implementation(NAME)
    found = context.rounds(context.whole)
    context.model.set_attn_implementation("sdpa")
    return found


def along_the_answer(context: Context) -> torch.Tensor:
    """Log-probabilities of what follows each token of the answer but the last: float32 [tokens, vocabulary]."""
    given = context.answer[:-1]
    where = torch.arange(len(context.prompt), len(context.prompt) + len(given))[None]
    return context.model(torch.tensor([given]), past_key_values=context.whole(0), position_ids=where).logits[0].float().log_softmax(-1)


def compared(context: Context, drafting: Drafting, name: str, first: int | None, full: torch.Tensor) -> torch.Tensor:
    """Of the answer's tokens KL(full, packed) in nats, and whether the best next token is the same: [2, tokens]."""
    drafting.pack(context, name, first)
    context.model.set_attn_implementation(NAME)
    packed = along_the_answer(context)
    context.model.set_attn_implementation("sdpa")
    divergence = (full.exp() * (full - packed)).sum(-1)
    return torch.stack([divergence, (full.argmax(-1) == packed.argmax(-1)).float()])


def compare_all(
    model: PreTrainedModel, prompts: Iterable[tuple[str, list[int]]], names: Sequence[tuple[str, int | None]], drafting: Drafting
) -> None:
    """Print the mean divergence, and the share of equal best tokens, by method, over all prompts so far."""
    found: dict[tuple[str, int | None], list[torch.Tensor]] = {each: [] for each in names}
    for file, ids in prompts:
        context = Context(model, ids)
        full = along_the_answer(context)
        for each in names:
            found[each].append(compared(context, drafting, *each, full))
        means = {described(*each): torch.cat(parts, 1).mean(1).tolist() for each, parts in found.items()}
        print(file, {name: f"{kl:.4f} nats, {same:.3f} same" for name, (kl, same) in means.items()}, flush=True)


def described(name: str, first: int | None) -> str:
    """A method, and how many tokens are exact where that is not its own choice."""
    return name if first is None else f"{name}, {first} exact"


@torch.inference_mode()
def main() -> None:
    """Print accepted and offered drafts by method, after each prompt."""
    parser = parser_of(__doc__, "methods", default=["kivi", "kvquant", "kivi:2", "kvquant:2"])
    parser.add_argument("--limit", type=int, help="prompts, of the first")
    parser.add_argument("--exact", type=int, nargs="+", default=[None], help="first tokens that are not packed: the method's")
    parser.add_argument("--kl", action="store_true", help="compare what full KV and copies say next, along full KV's answer")
    args = parser.parse_args()
    drafting = Drafting()
    AttentionInterface.register(NAME, drafting)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model, tokenizer = load(args.model)
    counts = {(name, first): (0, 0) for name in args.methods for first in args.exact}
    if args.kl:
        prompts = ((file.name, tokenizer.encode(file.read_text())) for file in prompts_in(args.prompts)[: args.limit])
        compare_all(model, prompts, list(counts), drafting)
        return
    for file in prompts_in(args.prompts)[: args.limit]:
        context = Context(model, tokenizer.encode(file.read_text()))
        for name, first in counts:
            agreed, offered = accepted(context, drafting, name, first)
            counts[name, first] = (counts[name, first][0] + agreed, counts[name, first][1] + offered)
        print(file.name, {described(*each): f"{a}/{o} {a / o:.3f}" for each, (a, o) in counts.items()}, flush=True)


if __name__ == "__main__":
    main()
