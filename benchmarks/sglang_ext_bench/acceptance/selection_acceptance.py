"""How many greedy drafts full KV accepts when tokens are chosen for each step, by how they are, without a server: docs/results/longcot.md.

    sglang-ext-bench selection-acceptance --model MODEL --prompts FOLDER [--tokens T] [--share S] [--every N] [WAYS...]

Rounds are those of --kv-compressor spade: a choice before each, by queries of full KV, and one after every N steps, by those of drafts;
true and quest wait for each layer's own query instead, and verify-guided chooses before each round alone. No answer comes late. All ways go
through the model together, each with rounds of its own. Of predictions also the overlap with what the step's own query of full KV selects
is told, of sets by scores alone, mean over some steps of the answer, layers and heads.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import ClassVar

import torch
from sglang_ext_bench.acceptance.on_prompts import load, parser_of, prompts_in
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.selection.predictors import PREDICTORS
from sglang_ext.mem_cache.selection.scoring import (
    PredictedScoring,
    Scoring,
    ScoringInputs,
)
from sglang_ext.mem_cache.selection.top_tokens import overlap, top_tokens
from sglang_ext_bench.baselines.scorings import BASELINES
from sglang_ext_bench.baselines.true_query import TrueQueryScoring

DRAFTS, WINDOW, NAME = 16, 32, "selection_acceptance"
# Of an answer's steps overlaps are of each such.
OVERLAP_EVERY = 6


@dataclass(frozen=True)
class VerifyGuided(Scoring):
    """By the mean attention of the newest verified queries (compressors/verify_guided.py)."""

    name: ClassVar[str] = "verify-guided"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """The mean over queries, and over the query heads of a KV head."""
        queries = seen.queries.unflatten(2, (seen.keys.shape[2], -1)).flatten(3, 4)
        return (queries @ seen.keys.transpose(-1, -2) * seen.scaling).softmax(dim=-1).mean(dim=-2)


@dataclass(frozen=True)
class Followed(PredictedScoring):
    """Each token also has half of its predecessor's score: heads that copy attend next to what follows what they attend to now."""

    @property
    def name(self) -> str:
        """That of the predictor, and this."""
        return f"{super().name}, followed"

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """As of the predictor, and half as much of the token before."""
        found = super().scores(seen)
        return found + 0.5 * torch.nn.functional.pad(found, (1, 0))[..., :-1]


PREDICTED = tuple(way(each()) for way in (PredictedScoring, Followed) for each in PREDICTORS.values())
WAYS: dict[str, Scoring] = {each.name: each for each in (*PREDICTED, VerifyGuided(), *BASELINES)}


@dataclass
class Answered:
    """A prompt's greedy answer, its full KV, and the queries of its tokens.

    Attributes:
        prompt, answer: token ids.
        keys, values: by layer, [kv_heads, tokens, head_dim], rotary embedding applied.
        queries: by layer, [heads, at least the answer's tokens and a window before them, head_dim], the newest last.
        rotary: the model's.
    """

    prompt: list[int]
    answer: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: dict[int, torch.Tensor]
    rotary: Rotary

    def overlap(self, way: Scoring, share: float) -> float:
        """Of the set that each step's own query selects, the share that a prediction from the queries before it has."""
        last, found = len(self.answer) - 1, []
        steps = torch.arange(last - 1, 0, -OVERLAP_EVERY)
        lengths = len(self.prompt) + steps
        positions = lengths[:, None] + torch.arange(-WINDOW, 1)
        for layer, keys in enumerate(self.keys):
            windows = self.queries[layer][:, -WINDOW - last :].unfold(1, WINDOW + 1, 1)
            queries = windows.permute(1, 0, 3, 2)[steps, None]
            own = ScoringInputs(queries, positions, keys.expand(len(steps), 1, *keys.shape), keys.shape[-1] ** -0.5, self.rotary, lengths)
            before = replace(own, queries=queries[..., :-1, :], positions=positions[:, :-1])
            count = int(share * len(self.prompt))
            true, chosen = (top_tokens(each, count, 0, 0, lengths) for each in (TrueQueryScoring().scores(own), way.scores(before)))
            found.append(float(overlap(true, chosen, keys.shape[1]).mean()))
        return fmean(found)


@dataclass
class Rounds:
    """The rounds of one way to choose over one answer: where it is in them.

    Attributes:
        way, share, every: how tokens are chosen, how many of the context, and after how many steps anew.
        of: the answer.
        done: tokens of the answer before this round.
        step: drafts of this round that full KV accepts so far; -1 between rounds.
        accepted, offered: drafts of the rounds that are over.
        queries, chosen: by layer; the newest [heads, up to a window, head_dim], and int64 [kv_heads, count].
        tail: by layer, K and V of this round's tokens, [kv_heads, head_dim] each.
    """

    way: Scoring
    share: float
    every: int
    of: Answered
    done: int = 0
    step: int = -1
    accepted: int = 0
    offered: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    tail: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether the answer is."""
        return self.done >= len(self.of.answer) - 1

    @property
    def covered(self) -> int:
        """Tokens among which is chosen."""
        return len(self.of.prompt) + self.done

    def next_token(self) -> tuple[int, int]:
        """The token of this step, and its position; begins a round where none is under way."""
        if self.step < 0:
            self.step, self.tail, self.chosen = 0, defaultdict(list), {}
            ahead = len(self.of.answer) - 1 - self.done
            self.queries = {layer: queries[:, :-ahead][:, -WINDOW:] for layer, queries in self.of.queries.items()}
        return self.of.answer[self.done + self.step], self.covered + self.step

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of this step's token to what is chosen and to this round's tokens: [heads, head_dim]."""
        with_own = torch.cat([self.queries[layer], query[:, None]], dim=1)[:, -WINDOW:]
        if self.way.synchronous:
            self._choose(layer, with_own, self.covered + self.step)
        elif self.step == 0 or (self.way.name != VerifyGuided.name and self.step % self.every == 0):
            self._choose(layer, self.queries[layer], self.covered + self.step - 1)
        self.queries[layer] = with_own
        self.tail[layer].append((key, value))
        tails = (torch.stack(part, dim=1) for part in zip(*self.tail[layer]))
        places = self.chosen[layer][..., None].expand(-1, -1, key.shape[-1])
        keys, values = (torch.cat([full[layer].gather(1, places), new], dim=1) for full, new in zip((self.of.keys, self.of.values), tails))
        return torch.nn.functional.scaled_dot_product_attention(query[None, :, None], keys[None], values[None], enable_gqa=True)[0, :, 0]

    def _choose(self, layer: int, queries: torch.Tensor, newest: int) -> None:
        """Choose by queries of which the last is at position ``newest``."""
        keys = self.of.keys[layer][:, : self.covered]
        positions = torch.arange(newest + 1 - queries.shape[1], newest + 1)
        seen = ScoringInputs(queries[None, None], positions[None], keys[None, None], keys.shape[-1] ** -0.5, self.of.rotary)
        count = int(self.share * self.covered)
        self.chosen[layer] = top_tokens(self.way.scores(seen), count, Spade.sinks, Spade.recent)[0, 0]

    def judge(self, token: int) -> None:
        """A step has drafted this: what follows the first wrong one needs no look."""
        most = min(DRAFTS, len(self.of.answer) - 1 - self.done)
        right = token == self.of.answer[self.done + self.step + 1]
        self.step += right
        if not right or self.step == most:
            self.accepted, self.offered, self.done = self.accepted + self.step, self.offered + most, self.done + self.step + 1
            self.step = -1


class Selecting:
    """An attention function of transformers: over all that was cached, and notes queries; or of one token of each of some rounds.

    Attributes:
        noted: newest queries of each layer, [heads, tokens, head_dim].
        rounds: by place in the batch; none for the first kind.
        most: queries that are noted.
    """

    def __init__(self) -> None:
        self.noted: dict[int, torch.Tensor] = {}
        self.rounds: Sequence[Rounds] = ()
        self.most = 0

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention of [batch, heads, tokens, head_dim]."""
        layer = module.layer_idx
        if self.rounds:
            rows = [each.attend(layer, *(part[i, :, 0] for part in (query, key, value))) for i, each in enumerate(self.rounds)]
            return torch.stack(rows)[:, None], None
        known = [self.noted[layer]] if layer in self.noted else []
        self.noted[layer] = torch.cat([*known, query[0]], dim=1)[:, -self.most :]
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def answered(model: PreTrainedModel, selecting: Selecting, prompt: list[int], tokens: int) -> Answered:
    """The greedy answer of full KV."""
    cache, answer, following = DynamicCache(), [], prompt
    selecting.noted, selecting.rounds, selecting.most = {}, (), WINDOW + tokens
    while len(answer) < tokens:
        logits = model(torch.tensor([following]), past_key_values=cache, logits_to_keep=1).logits
        following = [int(logits[0, -1].argmax())]
        answer += following
    keys, values = ([getattr(layer, part)[0] for layer in cache.layers] for part in ("keys", "values"))
    return Answered(prompt, answer, keys, values, selecting.noted, Rotary(model.model.rotary_emb.inv_freq.float()))


def finish(model: PreTrainedModel, selecting: Selecting, rounds: Sequence[Rounds]) -> None:
    """All rounds of all ways, together in each step."""
    while running := [each for each in rounds if not each.over]:
        tokens, positions = zip(*(each.next_token() for each in running))
        selecting.rounds = running
        logits = model(torch.tensor(tokens)[:, None], position_ids=torch.tensor(positions)[:, None], use_cache=False).logits
        for each, token in zip(running, logits[:, -1].argmax(dim=-1).tolist()):
            each.judge(token)


def spread(values: Sequence[float]) -> str:
    """Mean, standard deviation, least and most."""
    return f"mean {fmean(values):.3f}, deviation {pstdev(values):.3f}, {min(values):.3f} to {max(values):.3f}"


@torch.inference_mode()
def main() -> None:
    """Print accepted and offered drafts by way to choose, after each prompt, and their spread."""
    parser = parser_of(__doc__, "ways", default=["current", "regressed", "true", "quest"], help=f"of {', '.join(WAYS)}")
    parser.add_argument("--tokens", type=int, help="of each prompt's beginning (default: all)")
    parser.add_argument("--answer", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--share", type=float, default=0.125, help="of the context, that each KV head reads")
    parser.add_argument("--every", type=int, default=1, help="steps after which tokens are chosen anew")
    args = parser.parse_args()
    selecting = Selecting()
    AttentionInterface.register(NAME, selecting)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model, tokenizer = load(args.model, attn_implementation=NAME)
    counts, overlaps = defaultdict(list), defaultdict(list)
    for file in prompts_in(args.prompts):
        of = answered(model, selecting, tokenizer.encode(file.read_text())[: args.tokens], args.answer)
        rounds = {way: Rounds(WAYS[way], args.share, args.every, of) for way in args.ways}
        finish(model, selecting, list(rounds.values()))
        for way, each in rounds.items():
            counts[way].append((each.accepted, each.offered))
            if isinstance(each.way, PredictedScoring):
                overlaps[way].append(of.overlap(each.way, args.share))
        told = {way: f"{each.accepted}/{each.offered} {each.accepted / each.offered:.3f}" for way, each in rounds.items()}
        print(file.name, told, {way: f"overlap {found[-1]:.3f}" for way, found in overlaps.items()}, flush=True)
    for way, found in counts.items():
        accepted, offered = map(sum, zip(*found))
        print(f"{way}: {accepted}/{offered} {accepted / offered:.3f}; by prompt {spread([a / o for a, o in found])}")
    for way, found in overlaps.items():
        print(f"{way}: overlap by prompt {spread(found)}")


if __name__ == "__main__":
    main()
