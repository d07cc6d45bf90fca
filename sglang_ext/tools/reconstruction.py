"""Scores how much the model attends to each token of a context while it repeats it (KVzip, Kim et al. 2025, arXiv 2505.23416).

:class:`PromptPrefix` tokenizes a document as it begins prompts. :class:`AttentionInputs` records the inputs of a transformers model's
attention layers while the model runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.tools import CommandError

# Placeholder for a document when the chat template's text is examined.
MARK = "A document."


@dataclass(frozen=True)
class PromptPrefix:
    """The text before a document in prompts: ``text``, or with ``chat`` the model's chat template, whose user's message it begins.

    ``system``: the system message in the template. None for the template's own.
    """

    text: str = ""
    chat: bool = False
    system: str | None = None

    def tokens(self, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
        """Token ids of a prompt up to the end of ``document``, tokenized as SGLang tokenizes prompts.

        Raises ``CommandError`` if the chat template changes the document's text, or if there is none.
        """
        if not self.chat:
            return tokenizer.encode(self.text + document)
        rendered = self._rendered(tokenizer, document)
        # Templates may strip a message.
        found = rendered.rfind(document.strip())
        if found < 0:
            raise CommandError("the chat template changes the document's text: pass the text before the document with --prefix-text")
        return tokenizer.encode(rendered[: found + len(document.strip())], add_special_tokens=False)

    def suffix(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids between a question and the model's answer. A line break if prompts have no template."""
        if tokenizer.chat_template is None:
            return tokenizer.encode("\n", add_special_tokens=False)
        rendered = self._rendered(tokenizer, MARK, answer=True)
        return tokenizer.encode(rendered[rendered.rindex(MARK) + len(MARK) :], add_special_tokens=False)

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, message: str, answer: bool = False) -> str:
        if tokenizer.chat_template is None:
            raise CommandError("--chat-template is given, but the model's tokenizer has none: use --prefix-text")
        messages = [{"role": "user", "content": message}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)


def read_text(path: Path) -> str:
    """Read a document's text. Raises ``CommandError`` if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}; pass files of text in UTF-8") from error


def check_device(device: str) -> None:
    """Raise ``CommandError`` unless torch can use the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise CommandError(f"--device {device}: {reason}; pass cpu, cuda where there is an NVIDIA GPU, or leave it out") from error


class AttentionInputs:
    """The hidden states that attention layers read, after the norm before them.

    Attributes:
        positions: int64 [samples], ascending: tokens whose states are kept, counted over all forwards.
        norms: For each layer, float32 [tokens of the last forward], norms of its states.
    """

    def __init__(self, layers: int, positions: torch.Tensor) -> None:
        self.positions = positions
        self.norms: list[torch.Tensor | None] = [None] * layers
        self._kept: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._seen = [0] * layers

    @contextmanager
    def record_inputs(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the forwards of ``model``, of one sequence each. Raises ``CommandError`` if its attention layers are not found."""
        layers = attention_layers(model)
        if [layer.layer_idx for layer in layers] != list(range(len(self.norms))):
            raise CommandError(
                f"{type(model).__name__} has {len(layers)} attention layers that are known as such, its config says "
                f"{len(self.norms)}: use a decoder whose layers all have attention"
            )
        hooks = [layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def kept(self) -> torch.Tensor:
        """States at :attr:`positions`: [layers, samples, hidden_size], in the model's dtype, on the CPU."""
        return torch.stack([torch.cat(of_layer) for of_layer in self._kept])

    def _see(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        (states,) = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layer = module.layer_idx
        self.norms[layer] = states.float().norm(dim=-1)
        begin, self._seen[layer] = self._seen[layer], self._seen[layer] + len(states)
        mine = self.positions[(self.positions >= begin) & (self.positions < self._seen[layer])] - begin
        self._kept[layer].append(states[mine.to(states.device)].cpu())


def attention_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that call attention functions, by layer. Such modules have both attributes, which attention functions read."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")]


def output_norms(module: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    """The norm of ``W_O v``, the contribution of each value, [kv_heads, tokens, head_dim], to a layer's output: float32 [kv_heads, group, tokens]."""
    kv_heads, _, dim = values.shape
    width = kv_heads * module.num_key_value_groups * dim
    # The output's map comes last. A map of queries may have the same shape.
    maps = [child for child in module.children() if isinstance(child, torch.nn.Linear) and child.in_features == width]
    if not maps:
        raise CommandError(f"{type(module).__name__} has no linear map of its {width} outputs, which KVzip+ weighs values by: use --target kvzip")
    weight = maps[-1].weight.float().unflatten(1, (kv_heads, -1, dim))
    gram = torch.einsum("jhgd,jhge->hgde", weight, weight)
    values = values.float()
    return torch.einsum("hgde,htd,hte->hgt", gram, values, values).clamp(min=0).sqrt()


ATTENTION = "sglang_ext_reconstruction"
# Queries processed together. Limits the memory.
QUERIES = 512


@dataclass(frozen=True)
class ReconstructionConfig:
    """How a context is repeated.

    The context's KV is computed once. Then, chunk by chunk, a prompt asks for the chunk, and the chunk itself follows. So its queries are
    those of a model that repeats it.

    A chunk has ``chunk`` tokens. The first ``sinks`` tokens are always kept, and take part in the attention of all chunks. ``whole_prompt``
    asks for the first chunk, ``part_prompt`` for the others; it quotes ``lead`` tokens before the chunk. Nothing before token ``begin`` is
    repeated; the scores there are 0.
    """

    chunk: int = 2048
    sinks: int = 4
    lead: int = 8
    whole_prompt: str = "\n\nRepeat the previous context exactly."
    part_prompt: str = "\n\nRepeat the part of the previous context exactly, starting with"
    begin: int = 0


@dataclass
class AttentionRecorder:
    """An attention function for transformers that also records the largest attention that each key of a span receives.

    Attributes:
        scores: float32 [layers, kv_heads, tokens], filled span by span.
        sinks: First keys that take part, in addition to the span and the queries' own.
        inputs: Records the inputs of layers, for KVzip+ (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891). KVzip+ divides attention by
            the norm of the query's hidden state, and multiplies it by that of ``W_O v``. None for KVzip.
        span: The keys to score. None while the context's KV is computed.
    """

    scores: torch.Tensor
    sinks: int
    inputs: AttentionInputs | None = None
    span: range | None = None

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Compute attention as usual. The tensors are [1, heads, tokens, head_dim], with rotary embedding applied."""
        if self.span is not None:
            begin, end = self.span.start, self.span.stop
            of_query = of_value = None
            if self.inputs is not None:
                of_query, of_value = self.inputs.norms[module.layer_idx], output_norms(module, value[0, :, begin:end])
            self.scores[module.layer_idx, :, begin:end] = self._largest(query[0], key[0], kwargs["scaling"], of_query, of_value)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def _largest(
        self, queries: torch.Tensor, keys: torch.Tensor, scaling: float, of_query: torch.Tensor | None, of_value: torch.Tensor | None
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
    """Score the importance of a context's KV pairs: float32 [layers, kv_heads, tokens], infinite for the first tokens.

    The attention of ``model``, a decoder of transformers, is replaced permanently. ``encode`` adds no special tokens. ``suffix`` ends the
    prompt for a chunk and begins the answer. ``progress`` is called with numbers of computed or repeated tokens. ``inputs`` records the inputs
    of ``model``, for the normalization of KVzip+; None for KVzip.
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
    for begin in range(how.begin, len(tokens), how.chunk):
        # The model reads a prompt and the span itself.
        watch.span = span = range(begin, min(begin + how.chunk, len(tokens)))
        asked = encode(how.whole_prompt)
        if begin > how.begin:
            asked = encode(how.part_prompt) + tokens[max(how.begin, begin - how.lead) : begin]
        _forward(model, asked + suffix + tokens[span.start : span.stop], cache)
        cache.crop(len(tokens))
        progress(len(span))
    scores[..., : how.sinks] = float("inf")
    return scores


def _forward(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> None:
    """Run the layers. The output of the last is not used."""
    model.base_model(input_ids=torch.tensor([tokens], device=model.device), past_key_values=cache, use_cache=True)
