"""Measures the acceptance rate of compressors that quantize tokens, with transformers on a CPU and without a server.

    sglang-ext-bench quantized-acceptance --model MODEL --prompts FOLDER kivi kivi:2 "hack:2 --kv-partition 32"

Each round drafts on the quantized prompt and on the exact KV of the newer tokens, with the plugin's packing and attention. Methods have the
names of `sglang-ext-bench quality --compressor`: kivi:2 has 2 bits, and flags may follow. Rounds are those of kvzap-acceptance.

After each prompt, a line has the figures of all prompts so far: for each method the accepted and the offered drafts and their ratio.
With --kl, drafts are not counted. The model reads the greedy answer of the full KV on full and on quantized KV. The figures are the mean
KL divergence of the next token in nats, and the share of positions at which both have the same best token.
"""

import argparse
from typing import Any

import torch

from sglang_ext.layers.attention.packed import packed_attention
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.catalogue import method
from sglang_ext.tools import CommandError
from sglang_ext_bench.acceptance.attention_functions import AttentionOutput, register_attention, use_attention
from sglang_ext_bench.acceptance.inputs import add_input_arguments, load_model, read_prompts
from sglang_ext_bench.acceptance.prompt_context import DraftCount, PromptContext, print_line
from sglang_ext_bench.quality.named_method import NamedMethod

ATTENTION = "quantized_prompt"
Case = tuple[NamedMethod, str, int | None]
"""A method, its name on the command line, and the first tokens that stay exact; None for the method's own number."""


class QuantizedPromptAttention:
    """An attention function that reads the quantized tokens of a prompt, and its other tokens exactly.

    Call :meth:`quantize` before the first forward.
    """

    def quantize(self, context: PromptContext, named: NamedMethod, num_exact: int | None) -> None:
        """Quantize the KV of a prompt.

        Args:
            context: The prompt.
            named: The method.
            num_exact: First tokens that stay exact. None for the method's own number.
        """
        tokens = len(context.prompt)
        keys, values = (
            tuple(getattr(layer, kind)[0, :, :tokens].transpose(0, 1).contiguous() for layer in context.cache.layers)
            for kind in ("keys", "values")
        )
        buffers = KVBuffers(tuple(range(len(keys))), (1.0,) * len(keys), keys, values)
        rotary = Rotary(context.model.model.rotary_emb.inv_freq.float())
        packing = Packing.for_pool(method(named.compressor, named.bits, named.partition).quantizer, buffers, 1, rotary)
        first = packing.sinks if num_exact is None else num_exact
        count = (tokens - packing.recent - first) // packing.unit * packing.unit
        if count <= 0:
            raise CommandError(f"a prompt has {tokens} tokens, too few for a block of {named.compressor}: pass longer prompts in --prompts")
        kept = torch.arange(first, first + count).expand(len(keys), keys[0].shape[1], -1)
        seeds = token_seeds(context.prompt, tokens, kept.device) if packing.stochastic else None
        # The blocks overwrite the first slots of the copied KV. `write` reads all tokens before it writes blocks.
        self._num_slots = packing.packed_slots(count)
        packing.write(buffers, kept, torch.arange(tokens), torch.arange(self._num_slots), seeds)
        self._blocks = [(key[: self._num_slots], value[: self._num_slots]) for key, value in zip(keys, values)]
        self._packing, self._quantized = packing, range(first, first + count)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> AttentionOutput:
        """Attention of one sequence; tensors are [1, heads, tokens, head_dim]."""
        by_token = (part[0].transpose(0, 1) for part in (key, value))
        exact = (torch.cat([part[: self._quantized.start], part[self._quantized.stop :]]) for part in by_token)
        keys, values = (torch.cat(parts) for parts in zip(self._blocks[module.layer_idx], exact))
        queries, row = query[0].transpose(0, 1), torch.arange(len(keys))
        return packed_attention(self._packing, queries, keys, values, row, self._num_slots, module.scaling)[None], None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = ["kivi", "kvquant", "kivi:2", "kvquant:2"]
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=default, help=f"default: {' '.join(default)}")
    add_input_arguments(parser)
    parser.add_argument("--limit", type=int, help="number of prompts, from the first; default: all")
    parser.add_argument("--exact", type=int, nargs="+", default=[None], metavar="TOKENS", help="first tokens that stay exact; default: the method's")
    parser.add_argument("--kl", action="store_true", help="compare next tokens on full and on quantized KV, along the answer of the full KV")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure all prompts. Returns 0."""
    cases = [(NamedMethod.parse(name), name, num_exact) for name in args.methods for num_exact in args.exact]
    attention = QuantizedPromptAttention()
    register_attention(ATTENTION, attention)
    model, tokenizer = load_model(args)
    counts = {case_label(case): DraftCount() for case in cases}
    compared: dict[str, list[torch.Tensor]] = {case_label(case): [] for case in cases}
    for prompt in read_prompts(args, tokenizer, args.limit):
        context = PromptContext(model, prompt.input_ids)
        full = answer_logprobs(context) if args.kl else None
        for case in cases:
            named, _, num_exact = case
            attention.quantize(context, named, num_exact)
            with use_attention(model, ATTENTION):
                if full is None:
                    counts[case_label(case)] += context.run_rounds(context.full_cache)
                else:
                    compared[case_label(case)].append(compare_logprobs(full, answer_logprobs(context)))
        print_line(prompt.name, describe_divergence(compared) if args.kl else counts)
    return 0


def case_label(case: Case) -> str:
    """The name of a method, with the number of exact tokens if --exact has it."""
    _, name, num_exact = case
    return name if num_exact is None else f"{name}, {num_exact} exact"


def answer_logprobs(context: PromptContext) -> torch.Tensor:
    """Log-probabilities after each token of the answer but the last: float32 [tokens, vocabulary]."""
    return context.answer_logits(context.answer[:-1], 0, context.full_cache(0)).float().log_softmax(-1)


def compare_logprobs(full: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """Compare log-probabilities, [tokens, vocabulary]: KL(full, quantized) in nats and equality of the best token, [2, tokens]."""
    divergence = (full.exp() * (full - quantized)).sum(-1)
    return torch.stack([divergence, (full.argmax(-1) == quantized.argmax(-1)).float()])


def describe_divergence(compared: dict[str, list[torch.Tensor]]) -> dict[str, str]:
    """The means over all prompts so far, by case."""
    means = {label: torch.cat(parts, 1).mean(1).tolist() for label, parts in compared.items()}
    return {label: f"{divergence:.4f} nats, {same:.3f} same" for label, (divergence, same) in means.items()}
