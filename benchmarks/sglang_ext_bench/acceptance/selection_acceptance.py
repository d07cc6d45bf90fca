"""Measures the acceptance rate of methods that select tokens for each step, with transformers and without a server.

    sglang-ext-bench selection-acceptance --model MODEL --prompts FOLDER --tokens 2048 --answer 48 current regressed true quest

Rounds are those of --kv-compressor spade. Before each round, tokens are selected with queries of the full KV. Every --every steps, they are
selected again with the queries of draft steps. `true` and `quest` use each layer's own query instead, and `verify-guided` selects before
each round only. No selection is late. All scorings run through the model as one batch, each with its own rounds.

After each prompt, a line has the accepted and the offered drafts of each scoring and their ratio. For predictions of queries it also has
the overlap: the share of the tokens selected with the step's own query that the prediction selects, too. It is the mean over every sixth
step of the answer, over layers and over heads, with selections by scores alone. The last lines have each scoring's figures of all prompts
and their spread.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.predictors import PREDICTORS
from sglang_ext.mem_cache.selection.scoring import top_tokens
from sglang_ext_bench.acceptance.attention_functions import AttentionOutput, register_attention
from sglang_ext_bench.acceptance.inputs import add_input_arguments, load_model, read_prompts
from sglang_ext_bench.acceptance.prompt_context import ANSWER_TOKENS, DRAFT_LENGTH, DraftCount, print_line
from sglang_ext_bench.baselines.scoring_inputs import Scoring, ScoringInputs
from sglang_ext_bench.baselines.scorings import BASELINES, PredictedScoring, overlap
from sglang_ext_bench.baselines.true_query import TrueQueryScoring
from sglang_ext_bench.options import check_budgets, check_counts, check_known

ATTENTION = "selection_acceptance"
WINDOW = 32
"""Newest queries that scorings read."""
OVERLAP_INTERVAL = 6
"""The overlap is measured at one of so many steps of the answer."""


@dataclass(frozen=True)
class VerifyGuidedScoring(Scoring):
    """Scores by the mean attention of the newest verified queries, as compressors/attention_scores.py."""

    name: ClassVar[str] = "verify-guided"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The mean over queries, and over the query heads of a KV head."""
        queries = seen.queries.unflatten(2, (seen.keys.shape[2], -1)).flatten(3, 4)
        return (queries @ seen.keys.transpose(-1, -2) * seen.scaling).softmax(dim=-1).mean(dim=-2)


@dataclass(frozen=True)
class SuccessorScoring(PredictedScoring):
    """Adds half of the previous token's score to each token.

    Heads that copy text attend next to the token after the one that they attend to now.
    """

    @property
    def name(self) -> str:
        """The predictor's name, with a suffix."""
        return f"{super().name}, followed"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The predictor's scores, plus half of the score of the token before."""
        found = super().scores(seen)
        return found + 0.5 * torch.nn.functional.pad(found, (1, 0))[..., :-1]


PREDICTED = tuple(kind(predictor()) for kind in (PredictedScoring, SuccessorScoring) for predictor in PREDICTORS.values())
SCORINGS: dict[str, Scoring] = {scoring.name: scoring for scoring in (*PREDICTED, VerifyGuidedScoring(), *BASELINES)}


@dataclass
class GreedyAnswer:
    """A prompt's greedy answer, its full KV and the newest queries.

    Attributes:
        prompt: Token ids.
        answer: Token ids.
        keys: By layer, [kv_heads, tokens, head_dim], rotary embedding applied.
        values: By layer, [kv_heads, tokens, head_dim].
        queries: By layer, [heads, tokens, head_dim], rotary embedding applied: those of the answer, and WINDOW or more before it.
        rotary: Rotary embedding of the model.
    """

    prompt: list[int]
    answer: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: dict[int, torch.Tensor]
    rotary: Rotary

    def overlap(self, scoring: Scoring, share: float) -> float:
        """Share of the tokens selected with a step's own query that ``scoring`` selects with the queries before it, too."""
        last, found = len(self.answer) - 1, []
        steps = torch.arange(last - 1, 0, -OVERLAP_INTERVAL)
        lengths = len(self.prompt) + steps
        positions = lengths[:, None] + torch.arange(-WINDOW, 1)
        for layer, keys in enumerate(self.keys):
            windows = self.queries[layer][:, -WINDOW - last :].unfold(1, WINDOW + 1, 1)
            queries = windows.permute(1, 0, 3, 2)[steps, None]
            own = ScoringInputs(queries, positions, keys.expand(len(steps), 1, *keys.shape), keys.shape[-1] ** -0.5, self.rotary, lengths)
            before = replace(own, queries=queries[..., :-1, :], positions=positions[:, :-1])
            count = int(share * len(self.prompt))
            scores = TrueQueryScoring().scores(own), scoring.scores(before)
            true, selected = (own.select(each, count) for each in scores)
            found.append(float(overlap(true, selected, keys.shape[1]).mean()))
        return fmean(found)


@dataclass
class SelectionRounds:
    """The rounds of one scoring over an answer, as a state machine that takes one draft step at a time.

    Attributes:
        scoring: Scores the tokens of the context.
        share: Share of the context that each KV head reads.
        interval: Draft steps between two selections.
        target: The prompt and its answer.
        done: Verified tokens of the answer.
        step: Accepted drafts of this round so far. -1 between rounds.
        count: Accepted and offered drafts of the finished rounds.
        queries: By layer, the newest queries, [heads, up to WINDOW, head_dim].
        selected: By layer, positions that are read, int64 [kv_heads, count].
        tail: By layer, keys and values of this round's tokens, [kv_heads, head_dim] each.
    """

    scoring: Scoring
    share: float
    interval: int
    target: GreedyAnswer
    done: int = 0
    step: int = -1
    count: DraftCount = DraftCount()
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    tail: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the whole answer is verified."""
        return self.done >= len(self.target.answer) - 1

    @property
    def context_len(self) -> int:
        """Number of tokens among which the scoring selects."""
        return len(self.target.prompt) + self.done

    def next_token(self) -> tuple[int, int]:
        """The token of the next step and its position. Begins a new round between rounds."""
        if self.step < 0:
            self.step, self.tail, self.selected = 0, defaultdict(list), {}
            remaining = len(self.target.answer) - 1 - self.done
            self.queries = {layer: queries[:, :-remaining][:, -WINDOW:] for layer, queries in self.target.queries.items()}
        return self.target.answer[self.done + self.step], self.context_len + self.step

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of this step's token to the selected tokens and to this round's tokens.

        Args:
            layer: Index of the layer.
            query: [heads, head_dim].
            key: [kv_heads, head_dim].
            value: [kv_heads, head_dim].

        Returns:
            [heads, head_dim].
        """
        with_own = torch.cat([self.queries[layer], query[:, None]], dim=1)[:, -WINDOW:]
        if self.scoring.synchronous:
            self._select(layer, with_own, self.context_len + self.step)
        elif self.step == 0 or (self.scoring.name != VerifyGuidedScoring.name and self.step % self.interval == 0):
            self._select(layer, self.queries[layer], self.context_len + self.step - 1)
        self.queries[layer] = with_own
        self.tail[layer].append((key, value))
        tails = (torch.stack(part, dim=1) for part in zip(*self.tail[layer]))
        positions = self.selected[layer][..., None].expand(-1, -1, key.shape[-1])
        full = self.target.keys[layer], self.target.values[layer]
        keys, values = (torch.cat([part.gather(1, positions), new], dim=1) for part, new in zip(full, tails))
        return torch.nn.functional.scaled_dot_product_attention(query[None, :, None], keys[None], values[None], enable_gqa=True)[0, :, 0]

    def _select(self, layer: int, queries: torch.Tensor, newest: int) -> None:
        """Select tokens with ``queries``, the last of which is at position ``newest``."""
        keys = self.target.keys[layer][:, : self.context_len]
        positions = torch.arange(newest + 1 - queries.shape[1], newest + 1)
        inputs = ScoringInputs(queries[None, None], positions[None], keys[None, None], keys.shape[-1] ** -0.5, self.target.rotary)
        count = int(self.share * self.context_len)
        self.selected[layer] = top_tokens(self.scoring.scores(inputs), count, Spade.sinks, Spade.recent)[0, 0]

    def verify(self, draft: int) -> None:
        """Compare the draft of this step with the answer. A rejected draft ends the round."""
        draft_length = min(DRAFT_LENGTH, len(self.target.answer) - 1 - self.done)
        is_accepted = draft == self.target.answer[self.done + self.step + 1]
        self.step += is_accepted
        if not is_accepted or self.step == draft_length:
            self.count += DraftCount(self.step, draft_length)
            self.done += self.step + 1
            self.step = -1


class SelectionAttention:
    """An attention function for one sequence on full KV, or for one token of each of several rounds.

    Attributes:
        rounds: Rounds by index in the batch. Without rounds it attends to the full KV, and records queries.
        max_recorded: Number of newest queries to record.
        recorded: Recorded queries by layer, [heads, tokens, head_dim].
    """

    def __init__(self) -> None:
        self.rounds: Sequence[SelectionRounds] = ()
        self.max_recorded = 0
        self.recorded: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> AttentionOutput:
        """Attention; tensors are [batch, heads, tokens, head_dim]."""
        layer = module.layer_idx
        if self.rounds:
            rows = [rounds.attend(layer, *(part[i, :, 0] for part in (query, key, value))) for i, rounds in enumerate(self.rounds)]
            return torch.stack(rows)[:, None], None
        earlier = [self.recorded[layer]] if layer in self.recorded else []
        self.recorded[layer] = torch.cat([*earlier, query[0]], dim=1)[:, -self.max_recorded :]
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def greedy_answer(model: PreTrainedModel, attention: SelectionAttention, prompt: list[int], tokens: int) -> GreedyAnswer:
    """Decode ``tokens`` tokens on the full KV."""
    cache, answer, new_tokens = DynamicCache(), [], prompt
    attention.recorded, attention.rounds, attention.max_recorded = {}, (), WINDOW + tokens
    while len(answer) < tokens:
        logits = model(torch.tensor([new_tokens]), past_key_values=cache, logits_to_keep=1).logits
        new_tokens = [int(logits[0, -1].argmax())]
        answer += new_tokens
    keys, values = ([getattr(layer, part)[0] for layer in cache.layers] for part in ("keys", "values"))
    return GreedyAnswer(prompt, answer, keys, values, attention.recorded, Rotary(model.model.rotary_emb.inv_freq.float()))


def run_rounds(model: PreTrainedModel, attention: SelectionAttention, all_rounds: Sequence[SelectionRounds]) -> None:
    """Run the rounds of all scorings. Each step is one forward of the batch."""
    while running := [rounds for rounds in all_rounds if not rounds.is_finished]:
        tokens, positions = zip(*(rounds.next_token() for rounds in running))
        attention.rounds = running
        logits = model(torch.tensor(tokens)[:, None], position_ids=torch.tensor(positions)[:, None], use_cache=False).logits
        for rounds, draft in zip(running, logits[:, -1].argmax(dim=-1).tolist()):
            rounds.verify(draft)


def describe_spread(values: Sequence[float]) -> str:
    """Mean, standard deviation, smallest and largest value."""
    return f"mean {fmean(values):.3f}, deviation {pstdev(values):.3f}, {min(values):.3f} to {max(values):.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = ["current", "regressed", "true", "quest"]
    text = f"of: {'; '.join(SCORINGS)} (default: {' '.join(default)})"
    parser.add_argument("scorings", nargs="*", metavar="SCORING", default=default, help=text)
    add_input_arguments(parser)
    parser.add_argument("--tokens", type=int, help="tokens of each prompt, from its beginning; default: all")
    parser.add_argument("--answer", type=int, default=ANSWER_TOKENS, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.125, help="share of the context that each KV head reads (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="draft steps between two selections (default: %(default)s)")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure all prompts, and print the spread at the end. Returns 0."""
    check_known("SCORING", args.scorings, SCORINGS)
    check_counts({"--every": args.every, "--tokens": 1 if args.tokens is None else args.tokens})
    check_counts({"--answer": args.answer}, least=3)
    check_budgets([args.share], "--share")
    attention = SelectionAttention()
    register_attention(ATTENTION, attention)
    model, tokenizer = load_model(args, ATTENTION)
    counts: dict[str, list[DraftCount]] = defaultdict(list)
    overlaps: dict[str, list[float]] = defaultdict(list)
    for prompt in read_prompts(args, tokenizer):
        target = greedy_answer(model, attention, list(prompt.input_ids[: args.tokens]), args.answer)
        rounds = {name: SelectionRounds(SCORINGS[name], args.share, args.every, target) for name in args.scorings}
        run_rounds(model, attention, list(rounds.values()))
        for name, finished in rounds.items():
            counts[name].append(finished.count)
            if isinstance(finished.scoring, PredictedScoring):
                overlaps[name].append(target.overlap(finished.scoring, args.share))
        last = {name: f", overlap {found[-1]:.3f}" for name, found in overlaps.items()}
        print_line(prompt.name, {name: f"{found[-1]}{last.get(name, '')}" for name, found in counts.items()})
    for name, found in counts.items():
        rates = [count.accepted / count.offered for count in found]
        print(f"{name}: {sum(found, DraftCount())}; by prompt {describe_spread(rates)}")
    for name, values in overlaps.items():
        print(f"{name}: overlap by prompt {describe_spread(values)}")
    return 0
