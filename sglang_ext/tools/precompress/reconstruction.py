"""How much the model attends to each token of a context while it repeats it (KVzip, Kim et al. 2025, arXiv 2505.23416)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.tools.precompress.attention_inputs import AttentionInputs, output_norms

ATTENTION = "sglang_ext_reconstruction"
# Queries that are looked at together; bounds the memory.
QUERIES = 512


@dataclass(frozen=True)
class ReconstructionConfig:
    """How a context is repeated. The context's KV is computed once; then, chunk by chunk, a prompt asks for the chunk, and the
    chunk itself follows, so that its queries are those of a model that repeats it.

    Attributes:
        chunk: tokens that are repeated at once.
        sinks: first tokens, kept in any case; while other chunks are repeated they draw their share of attention.
        lead: tokens before a chunk, by which the prompt says where to begin.
        whole_prompt, part_prompt: ask for the first chunk, and for others.
        begin: tokens before which nothing is repeated; their scores are 0.
    """

    chunk: int = 2048
    sinks: int = 4
    lead: int = 8
    whole_prompt: str = "\n\nRepeat the previous context exactly."
    part_prompt: str = "\n\nRepeat the part of the previous context exactly, starting with"
    begin: int = 0


@dataclass
class AttentionRecorder:
    """An attention function of transformers that also notes the largest attention that the keys of a span get.

    Attributes:
        scores: float32 [layers, kv_heads, tokens], filled span by span.
        sinks: first keys that take part beside the span and the queries' own.
        inputs: sees what enters the layers, for KVzip+ (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891): attention is
            divided by the norm of the query's hidden state, and multiplied by that of ``W_O v``. None for KVzip.
        span: the keys that are looked at; None while the context's KV is computed.
    """

    scores: torch.Tensor
    sinks: int
    inputs: AttentionInputs | None = None
    span: range | None = None

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention as ever; the tensors are [1, heads, tokens, head_dim], rotary embedding applied."""
        if self.span is not None:
            begin, end = self.span.start, self.span.stop
            of_query = of_value = None
            if self.inputs is not None:
                of_query, of_value = self.inputs.norms[module.layer_idx], output_norms(module, value[0, :, begin:end])
            self.scores[module.layer_idx, :, begin:end] = self._largest(query[0], key[0], kwargs["scaling"], of_query, of_value)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def _largest(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        scaling: float,
        of_query: torch.Tensor | None,
        of_value: torch.Tensor | None,
    ) -> torch.Tensor:
        """The largest attention over queries and query heads: float32 [kv_heads, tokens of the span].

        Divided by ``of_query``, [queries], and multiplied by ``of_value``, [kv_heads, group, tokens of the span], if given.
        """
        own, sinks = queries.shape[1], min(self.sinks, self.span.start)
        seen = torch.cat([keys[:, :sinks], keys[:, self.span.start : self.span.stop], keys[:, -own:]], dim=1).float()
        before = sinks + len(self.span)
        largest = seen.new_zeros(len(keys), len(self.span))
        for begin in range(0, own, QUERIES):
            some = queries[:, begin : begin + QUERIES].float()
            of_group = some.unflatten(0, (len(keys), -1))
            later = torch.ones(some.shape[1], own, dtype=torch.bool, device=keys.device).triu(begin + 1)
            for head, group in enumerate(of_group):
                logits = group @ seen[head].t() * scaling
                logits[..., before:].masked_fill_(later, float("-inf"))
                found = logits.softmax(dim=-1)[..., sinks:before]
                if of_query is not None:
                    found = found / of_query[begin : begin + QUERIES, None]
                found = found.amax(dim=1)
                if of_value is not None:
                    found = found * of_value[head]
                largest[head] = torch.maximum(largest[head], found.amax(dim=0))
        return largest


@torch.inference_mode()
def reconstruction_scores(
    model: PreTrainedModel,
    encode: Callable[[str], list[int]],
    tokens: list[int],
    suffix: list[int],
    how: ReconstructionConfig,
    progress: Callable[[int], None] = lambda tokens: None,
    inputs: AttentionInputs | None = None,
) -> torch.Tensor:
    """Importance of a context's KV pairs: float32 [layers, kv_heads, tokens], infinite for the first tokens.

    Args:
        model: a decoder of transformers; its attention is replaced for good.
        encode: token ids of a text, without special tokens.
        tokens: the context's token ids.
        suffix: token ids that end the asking prompt and begin the answer.
        how: the method's settings.
        progress: told how many tokens more were computed or repeated.
        inputs: watches ``model``, for the normalization of KVzip+; None for KVzip.
    """
    config = model.config.get_text_config()
    scores = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, len(tokens), device=model.device)
    watch = AttentionRecorder(scores, how.sinks, inputs)
    AttentionInterface.register(ATTENTION, watch)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    cache = DynamicCache()
    for begin in range(0, len(tokens), how.chunk):
        some = tokens[begin : begin + how.chunk]
        _forward(model, some, cache)
        progress(len(some))
    for span, asked in _chunks(encode, tokens, suffix, how):
        watch.span = span
        _forward(model, asked, cache)
        cache.crop(len(tokens))
        progress(len(span))
    scores[..., : how.sinks] = float("inf")
    return scores


def _chunks(
    encode: Callable[[str], list[int]], tokens: list[int], suffix: list[int], how: ReconstructionConfig
) -> Iterator[tuple[range, list[int]]]:
    """Spans of the context, and what the model reads for each: the prompt and the span itself."""
    for begin in range(how.begin, len(tokens), how.chunk):
        span = range(begin, min(begin + how.chunk, len(tokens)))
        asked = encode(how.whole_prompt)
        if begin > how.begin:
            asked = encode(how.part_prompt) + tokens[max(how.begin, begin - how.lead) : begin]
        yield span, asked + suffix + tokens[span.start : span.stop]


def _forward(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> None:
    """Run the layers; what comes out of the last is of no use."""
    model.base_model(input_ids=torch.tensor([tokens], device=model.device), past_key_values=cache, use_cache=True)
