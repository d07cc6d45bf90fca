"""A prompt with its full KV and greedy answer, and the rounds of verified decoding over it.

A round drafts up to DRAFT_LENGTH tokens on changed KV. Up to the first rejected draft, the drafts equal the tokens of the answer. So one
forward of the answer's next tokens on the changed KV gives the number of accepted drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import LayerKV
from sglang_ext.mem_cache.compressors.attention_scores import ExpectedAttention, SnapKV
from sglang_ext.mem_cache.scores import Predictor
from sglang_ext.tools.reconstruction import AttentionInputs, PromptPrefix, ReconstructionConfig, attention_layers, reconstruction_scores
from sglang_ext_bench.acceptance.inputs import DEFAULT_ATTENTION
from sglang_ext_bench.prompts import Tokenizer

DRAFT_LENGTH = 16
ANSWER_TOKENS = 96
# First tokens that kvzip and kvzap always keep, and newest tokens that kvzap always keeps.
SINKS, RECENT = 4, 32
SCORING_METHODS = ("snapkv", "expected-attention", "kvzip", "kvzip+", "kvzap")


@dataclass(frozen=True)
class DraftCount:
    """Number of accepted and of offered draft tokens."""

    accepted: int = 0
    offered: int = 0

    def __add__(self, other: "DraftCount") -> "DraftCount":
        return DraftCount(self.accepted + other.accepted, self.offered + other.offered)

    def __str__(self) -> str:
        rate = f"{self.accepted / self.offered:.3f}" if self.offered else "-"
        return f"{self.accepted}/{self.offered} {rate}"


def print_line(prompt: str, figures: dict[str, object]) -> None:
    """Print the figures so far, by method, after a prompt was measured."""
    print(f"{prompt}: {'; '.join(f'{label}: {figure}' for label, figure in figures.items())}", flush=True)


def copy_cache(cache: DynamicCache, tokens: int) -> DynamicCache:
    """Copy the first ``tokens`` tokens of a cache."""
    copied = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copied.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return copied


def count_matches(predicted: torch.Tensor, expected: Sequence[int]) -> int:
    """Number of predicted tokens before the first one that differs."""
    equal = predicted == torch.tensor(expected)
    return int(equal.long().cumprod(0).sum())


class PromptContext:
    """A prompt's full KV, the inputs of its attention layers, and the greedy answer of the model.

    Attributes:
        model: The model, in float32.
        prompt: Token ids.
        cache: KV of the prompt and of the answer.
        hidden_states: Inputs of the attention layers for the prompt, [layers, tokens, hidden_size].
        answer: Token ids of the greedy answer, ANSWER_TOKENS of them.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        self.model, self.prompt, self.cache = model, list(prompt), DynamicCache()
        inputs = AttentionInputs(model.config.num_hidden_layers, torch.arange(len(prompt)))
        with inputs.record_inputs(model):
            logits = model(torch.tensor([self.prompt]), past_key_values=self.cache, logits_to_keep=1).logits
        self.hidden_states = inputs.kept()
        self.answer = [int(logits[0, -1].argmax())]
        while len(self.answer) < ANSWER_TOKENS:
            logits = model(torch.tensor([self.answer[-1:]]), past_key_values=self.cache).logits
            self.answer.append(int(logits[0, -1].argmax()))

    def layers(self, window: int) -> list[LayerKV]:
        """The inputs of a compressor, by layer, with the queries of the last ``window`` tokens of the prompt."""
        tokens = len(self.prompt)
        positions = torch.arange(tokens - window, tokens)
        cos_sin = self.model.model.rotary_emb(self.hidden_states[:1], positions[None])
        found = []
        for index, (module, kv) in enumerate(zip(attention_layers(self.model), self.cache.layers)):
            queries = module.q_proj(self.hidden_states[index, None, -window:]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            queries, _ = apply_rotary_pos_emb(queries, queries, *cos_sin)
            keys, values = (tensor[0, :, :tokens].transpose(0, 1) for tensor in (kv.keys, kv.values))
            found.append(LayerKV(keys, values, queries[0].transpose(0, 1), positions, module.scaling, index))
        return found

    def run_rounds(self, make_cache: Callable[[int], DynamicCache]) -> DraftCount:
        """Run rounds over the whole answer.

        Args:
            make_cache: Returns the KV that a round reads, given the number of answer tokens before the round.
        """
        accepted = offered = done = 0
        while done < ANSWER_TOKENS - 1:
            drafts = self.answer[done : min(done + DRAFT_LENGTH, ANSWER_TOKENS - 1)]
            predicted = self.answer_logits(drafts, done, make_cache(done)).argmax(dim=-1)
            matches = count_matches(predicted, self.answer[done + 1 : done + 1 + len(drafts)])
            accepted, offered, done = accepted + matches, offered + len(drafts), done + matches + 1
        return DraftCount(accepted, offered)

    def answer_logits(self, tokens: Sequence[int], first: int, cache: DynamicCache) -> torch.Tensor:
        """Logits after each of ``tokens``, which begin at index ``first`` of the answer: [tokens, vocabulary]."""
        begin = len(self.prompt) + first
        positions = torch.arange(begin, begin + len(tokens))[None]
        return self.model(torch.tensor([tokens]), past_key_values=cache, position_ids=positions).logits[0]

    def full_cache(self, num_answer: int) -> DynamicCache:
        """The full KV of the prompt and of the first ``num_answer`` tokens of the answer."""
        return copy_cache(self.cache, len(self.prompt) + num_answer)

    def compressed_cache(self, kept: torch.Tensor, num_answer: int) -> DynamicCache:
        """The kept KV of the prompt, and the full KV of the first ``num_answer`` tokens of the answer.

        Args:
            kept: Positions in the prompt, int64 [layers, kv_heads, count].
            num_answer: Number of answer tokens.
        """
        cache, tokens = DynamicCache(), len(self.prompt)
        for index, (layer, positions) in enumerate(zip(self.cache.layers, kept)):
            parts = []
            for full in (layer.keys, layer.values):
                selected = full[0].gather(1, positions[..., None].expand(-1, -1, full.shape[-1]))
                parts.append(torch.cat([selected[None], full[:, :, tokens : tokens + num_answer]], dim=2))
            cache.update(*parts, index)
        return cache


def token_scores(method: str, context: PromptContext, tokenizer: Tokenizer, predictor: Predictor | None) -> torch.Tensor:
    """Score the tokens of a prompt.

    Args:
        method: One of SCORING_METHODS.
        context: The prompt.
        tokenizer: The model's, for ``kvzip`` and ``kvzip+``.
        predictor: For ``kvzap``.

    Returns:
        float32 [layers, kv_heads, tokens].
    """
    if method == "snapkv":
        return torch.stack([SnapKV().scores(layer) for layer in context.layers(SnapKV.window)])
    if method == "expected-attention":
        expected, rotary = ExpectedAttention(), Rotary(context.model.model.rotary_emb.inv_freq.float())
        return torch.stack([expected.scores(replace(layer, rotary=rotary)) for layer in context.layers(expected.window)])
    if method == "kvzap":
        scores = torch.stack([predictor(layer, states).t() for layer, states in enumerate(context.hidden_states)])
        scores[..., -RECENT:] = float("inf")
    else:
        scores = _reconstruction_scores(context, tokenizer, with_norms=method == "kvzip+")
    scores[..., :SINKS] = float("inf")
    return scores


def _reconstruction_scores(context: PromptContext, tokenizer: Tokenizer, with_norms: bool) -> torch.Tensor:
    """Scores of KVzip, or of KVzip+ if ``with_norms``."""
    inputs = AttentionInputs(context.model.config.num_hidden_layers, torch.empty(0, dtype=torch.int64))
    suffix = PromptPrefix().suffix(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    with inputs.record_inputs(context.model):
        norms = inputs if with_norms else None
        scores = reconstruction_scores(context.model, encode, context.prompt, suffix, ReconstructionConfig(), inputs=norms)
    context.model.set_attn_implementation(DEFAULT_ATTENTION)
    return scores
