"""Measures the acceptance rate when verifications select the tokens of compressed KV, with transformers and without a server.

    sglang-ext-bench verify-guided-acceptance --model MODEL --prompts FOLDER snapkv window=32,recent=64

A RULE says how tokens are selected before each round. `snapkv` selects once, at the end of the prompt. Other rules are fields of
SelectionRule, separated by commas: window, recent, sinks, kernel, rows, heads, tail. Above temperature 0, drafts and verifications share the
noise of each position. Rounds are those of kvzap-acceptance.

At the end, a line for each budget and rule has the accepted and the offered drafts, their ratio, and the mean number of tokens that a
draft step reads.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.functional import avg_pool1d
from transformers import DynamicCache, PreTrainedModel

from sglang_ext.tools import CommandError
from sglang_ext_bench.acceptance.attention_functions import (
    AttentionOutput,
    KeptTokensAttention,
    keep_best,
    register_attention,
)
from sglang_ext_bench.acceptance.inputs import (
    add_input_arguments,
    load_model,
    read_prompts,
)
from sglang_ext_bench.acceptance.prompt_context import (
    ANSWER_TOKENS,
    DRAFT_LENGTH,
    DraftCount,
    copy_cache,
    count_matches,
)
from sglang_ext_bench.options import check_budgets, numbers

ATTENTION = "verify_guided"
SNAPKV = "snapkv"
NEWEST = 64
"""Newest tokens of the prompt whose queries are recorded. No window is longer."""
PER_HEAD = (2,)
"""Axis of scores [layers, kv_heads, tokens] along which tokens share a budget."""


@dataclass(frozen=True)
class SelectionRule:
    """How a round selects the tokens that draft steps read.

    Attributes:
        window: Number of newest verified queries whose attention counts. 0 for those of the last verification, 16 after the prompt.
        recent: Newest tokens that are always kept.
        sinks: First tokens that are always kept.
        kernel: Tokens over which scores are averaged.
        rows: Reduction over the window, mean or max.
        heads: Reduction over the query heads of a KV head, mean or max.
        tail: Keep all tokens of the answer, beside the budget of the prompt.
    """

    window: int = 32
    recent: int = 32
    sinks: int = 0
    kernel: int = 1
    rows: str = "mean"
    heads: str = "mean"
    tail: bool = False

    @classmethod
    def parse(cls, text: str) -> "SelectionRule":
        """Parse ``field=value,...``.

        Raises:
            CommandError: A field is unknown, or its value is not allowed.
        """
        allowed = {field.name: field.default for field in fields(cls)}
        values: dict[str, int | str | bool] = {}
        for pair in text.split(","):
            name, _, value = pair.partition("=")
            if name not in allowed:
                raise CommandError(f"RULE {text!r}: pass {SNAPKV}, or FIELD=VALUE with fields of {', '.join(allowed)}, separated by commas")
            values[name] = cls._parse_value(text, name, value)
        return cls(**values)

    @staticmethod
    def _parse_value(text: str, name: str, value: str) -> int | str | bool:
        if name in ("rows", "heads"):
            choices: dict[str, int | str | bool] = {"mean": "mean", "max": "max"}
        elif name == "tail":
            choices = {"true": True, "1": True, "false": False, "0": False}
        else:
            if not value.isdigit() or (name == "window" and int(value) > NEWEST) or (name == "kernel" and int(value) % 2 == 0):
                raise CommandError(
                    f"RULE {text!r}: {name} is {value!r}; pass a whole number of 0 or more, up to {NEWEST} for window, odd for kernel"
                )
            return int(value)
        if value.lower() not in choices:
            raise CommandError(f"RULE {text!r}: {name} is {value!r}; pass one of {', '.join(choices)}")
        return choices[value.lower()]


class RecordingAttention(KeptTokensAttention):
    """The attention function of :class:`KeptTokensAttention`, which also records the newest queries of each forward.

    Attributes:
        queries: By layer, the queries of each forward, [heads, tokens, head_dim], rotary embedding applied. None to record nothing.
    """

    queries: dict[int, list[torch.Tensor]] | None = None

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
        if self.queries is not None:
            self.queries.setdefault(module.layer_idx, []).append(query[0, :, -NEWEST:].clone())
        return super().__call__(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True)
class RuleFigures:
    """Figures of a rule, summed over rounds.

    Attributes:
        drafts: Accepted and offered drafts.
        read_tokens: Tokens of the context that a KV head reads, summed over rounds.
        rounds: Number of rounds.
    """

    drafts: DraftCount = DraftCount()
    read_tokens: int = 0
    rounds: int = 0

    def __add__(self, other: "RuleFigures") -> "RuleFigures":
        return RuleFigures(self.drafts + other.drafts, self.read_tokens + other.read_tokens, self.rounds + other.rounds)

    def __str__(self) -> str:
        return f"{self.drafts}, {self.read_tokens / self.rounds:.0f} tokens read"


class SampledAnswer:
    """A prompt's full KV and answer, and the attention of its newest tokens and of the answer.

    Attributes:
        attention: By reduction over query heads, float32 [layers, kv_heads, queries, tokens]. The first query is that of the NEWEST-th
            last token of the prompt.
    """

    def __init__(self, model: PreTrainedModel, recording: RecordingAttention, prompt: Sequence[int], temperature: float, seed: int) -> None:
        self.model, self.recording, self.prompt, self.cache = model, recording, list(prompt), DynamicCache()
        self.temperature = temperature
        uniform = torch.rand(ANSWER_TOKENS, model.config.vocab_size, generator=torch.Generator().manual_seed(seed))
        self.noise = -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()
        recording.queries = {}
        self.answer: list[int] = []
        new_tokens = self.prompt
        while len(self.answer) < ANSWER_TOKENS:
            logits = model(torch.tensor([new_tokens]), past_key_values=self.cache, logits_to_keep=1).logits
            new_tokens = self.sample(logits[0], len(self.answer)).tolist()
            self.answer += new_tokens
        self.attention = self._attention(recording.queries)
        recording.queries = None

    def sample(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Sample the tokens of the answer from index ``first`` on, from ``logits``, [tokens, vocabulary]."""
        if not self.temperature:
            return logits.argmax(dim=-1)
        return (logits / self.temperature + self.noise[first : first + len(logits)]).argmax(dim=-1)

    def _attention(self, queries: dict[int, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = len(self.prompt) + ANSWER_TOKENS - 1
        found: dict[str, list[torch.Tensor]] = {"mean": [], "max": []}
        hidden = torch.arange(tokens) > torch.arange(len(self.prompt) - NEWEST, tokens)[:, None]
        for index, layer in enumerate(self.cache.layers):
            keys = layer.keys[0, :, :tokens]
            grouped = torch.cat(queries[index], dim=1).unflatten(0, (len(keys), -1))
            logits = torch.einsum("hgwd,htd->hgwt", grouped, keys) * keys.shape[-1] ** -0.5
            weights = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            found["mean"].append(weights.mean(dim=1))
            found["max"].append(weights.amax(dim=1))
        return {heads: torch.stack(layers) for heads, layers in found.items()}

    def kept_tokens(self, rule: SelectionRule, budget: float, done: int, before: int) -> torch.Tensor:
        """The tokens that ``rule`` keeps: bool [layers, kv_heads, tokens].

        Args:
            rule: The rule.
            budget: Share of the tokens that a head keeps.
            done: Verified tokens of the answer.
            before: Verified tokens of the answer before the last verification.
        """
        first = NEWEST + done - rule.window if rule.window else NEWEST + (before if done else -16)
        weights = self.attention[rule.heads][:, :, max(0, first) : NEWEST + done, : len(self.prompt) + done]
        scores = weights.mean(dim=2) if rule.rows == "mean" else weights.amax(dim=2)
        flat = scores.reshape(-1, 1, scores.shape[-1])
        scores = avg_pool1d(flat, rule.kernel, stride=1, padding=rule.kernel // 2).view_as(scores)
        scores[..., : rule.sinks] = float("inf")
        scores[..., scores.shape[-1] - rule.recent :] = float("inf")
        if rule.tail:
            return self._with_answer(keep_best(scores[..., : len(self.prompt)], budget, PER_HEAD), done)
        return keep_best(scores, budget, PER_HEAD)

    def snapkv_tokens(self, budget: float, done: int) -> torch.Tensor:
        """The tokens of the prompt that SnapKV keeps, and ``done`` tokens of the answer: bool [layers, kv_heads, tokens]."""
        tokens, window = len(self.prompt), 32
        scores = self.attention["mean"][:, :, NEWEST - window : NEWEST, :tokens].mean(dim=2)
        scores[..., tokens - window :] = 0
        scores = avg_pool1d(scores.reshape(-1, 1, tokens), 5, stride=1, padding=2).view_as(scores)
        scores[..., tokens - window :] = float("inf")
        return self._with_answer(keep_best(scores, budget, PER_HEAD), done)

    def _with_answer(self, kept: torch.Tensor, done: int) -> torch.Tensor:
        return torch.cat([kept, kept.new_ones(*kept.shape[:2], done)], dim=-1)

    def run_rounds(self, rule: SelectionRule | None, budget: float) -> RuleFigures:
        """Run rounds over the whole answer. ``rule`` None is SnapKV."""
        figures, done, before = RuleFigures(), 0, 0
        while done < ANSWER_TOKENS - 1:
            drafts = self.answer[done : min(done + DRAFT_LENGTH, ANSWER_TOKENS - 1)]
            kept = self.snapkv_tokens(budget, done) if rule is None else self.kept_tokens(rule, budget, done, before)
            tokens = len(self.prompt) + done
            positions = torch.arange(tokens, tokens + len(drafts))[None]
            self.recording.kept = kept
            cache = copy_cache(self.cache, tokens)
            logits = self.model(torch.tensor([drafts]), past_key_values=cache, position_ids=positions).logits[0]
            self.recording.kept = None
            matches = count_matches(self.sample(logits, done + 1), self.answer[done + 1 : done + 1 + len(drafts)])
            figures += RuleFigures(DraftCount(matches, len(drafts)), int(kept[0, 0].sum()), 1)
            done, before = done + matches + 1, done
        return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = [SNAPKV, "window=32,recent=32"]
    parser.add_argument("rules", nargs="*", metavar="RULE", default=default, help=f"default: {' '.join(default)}")
    add_input_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--budgets", default="0.25,0.125,0.0625", help="shares of the tokens to keep, separated by commas (default: %(default)s)")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure all prompts, and print the figures at the end. Returns 0."""
    if args.temperature < 0:
        raise CommandError(f"--temperature {args.temperature:g}: pass 0 for greedy, or a temperature above 0")
    budgets = numbers(args.budgets, "--budgets", float)
    check_budgets(budgets)
    rules = {text: None if text == SNAPKV else SelectionRule.parse(text) for text in args.rules}
    recording = RecordingAttention()
    register_attention(ATTENTION, recording)
    model, tokenizer = load_model(args, ATTENTION)
    prompts = read_prompts(args, tokenizer)
    for prompt in prompts:
        if len(prompt.input_ids) < NEWEST:
            raise CommandError(f"prompt {prompt.name} has {len(prompt.input_ids)} tokens: pass prompts of at least {NEWEST} in --prompts")
    figures = {(budget, text): RuleFigures() for budget in budgets for text in rules}
    for seed, prompt in enumerate(prompts):
        answer = SampledAnswer(model, recording, prompt.input_ids, args.temperature, seed)
        for budget, text in figures:
            figures[budget, text] += answer.run_rounds(rules[text], budget)
        print(prompt.name, flush=True)
    for (budget, text), found in figures.items():
        print(f"{budget:g} {text}: {found}")
    return 0
