"""How many drafts full KV accepts when verifications choose what is kept, without a server: docs/benchmarks.md.

    sglang-ext-bench verify-guided-acceptance --model MODEL --prompts FOLDER [--temperature T] [--budgets B] [CHOICE...]

A choice is snapkv, made once at the prompt's end, or fields of Guided, as in window=32,recent=64. Rounds are those of
kvzap_acceptance.py; above temperature 0 draft and verification share the noise of each position.
"""

from dataclasses import dataclass

import torch
from sglang_ext_bench.acceptance.head_budgets_acceptance import Masked, kept_of
from sglang_ext_bench.acceptance.on_prompts import load, parser_of, prompts_in
from torch.nn.functional import avg_pool1d
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedModel,
)  # fmt: skip
from transformers.masking_utils import sdpa_mask

DRAFTS, ANSWER, NEWEST, NAME = 16, 96, 64, "verify_guided"
NOBODY_ELSE = (2,)


@dataclass(frozen=True)
class Guided:
    """How a round chooses.

    Attributes:
        window: newest verified queries that count; 0: those of the last verification, after the prompt 16.
        recent, sinks: newest and first tokens kept whatever they score.
        kernel: tokens over which scores are averaged.
        rows, heads: mean or max over the window, and over the query heads of a KV head.
        tail: whether the answer's tokens are all kept, beside the budget of the prompt.
    """

    window: int = 32
    recent: int = 32
    sinks: int = 0
    kernel: int = 1
    rows: str = "mean"
    heads: str = "mean"
    tail: bool = False

    @classmethod
    def of(cls, text: str) -> "Guided":
        """Of ``field=value,...``; a field's default tells its type."""
        given = dict(pair.split("=") for pair in text.split(","))
        return cls(**{name: type(getattr(cls, name))(value) for name, value in given.items()})


class Watched(Masked):
    """The same attention, which also notes the newest queries of each forward, rotary embedding applied, while it shall."""

    queries: dict[int, list[torch.Tensor]] | None = None

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention of [1, heads, tokens, head_dim]."""
        if self.queries is not None:
            self.queries.setdefault(module.layer_idx, []).append(query[0, :, -NEWEST:].clone())
        return super().__call__(module, query, key, value, attention_mask, **kwargs)


class Answered:
    """A prompt's answer and full KV, and how its newest tokens and the answer's attend to them.

    Attributes:
        attention: by ``heads``, float32 [layers, kv_heads, queries, tokens]; the first query is the prompt's ``NEWEST``-th last.
    """

    def __init__(self, model: PreTrainedModel, watched: Watched, prompt: list[int], temperature: float, seed: int) -> None:
        self.model, self.watched, self.prompt, self.cache = model, watched, prompt, DynamicCache()
        self.temperature = temperature
        uniform = torch.rand(ANSWER, model.config.vocab_size, generator=torch.Generator().manual_seed(seed))
        self.noise = -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()
        watched.queries, self.answer, following = {}, [], prompt
        while len(self.answer) < ANSWER:
            logits = model(torch.tensor([following]), past_key_values=self.cache, logits_to_keep=1).logits
            following = self.sampled(logits[0], len(self.answer)).tolist()
            self.answer += following
        self.attention = self._attention(watched.queries)
        watched.queries = None

    def sampled(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Tokens after ``logits``, [count, vocabulary], as answer's tokens from place ``first`` on."""
        if not self.temperature:
            return logits.argmax(dim=-1)
        return (logits / self.temperature + self.noise[first : first + len(logits)]).argmax(dim=-1)

    def _attention(self, queries: dict[int, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens, found = len(self.prompt) + ANSWER - 1, {"mean": [], "max": []}
        hidden = torch.arange(tokens) > torch.arange(len(self.prompt) - NEWEST, tokens)[:, None]
        for index, layer in enumerate(self.cache.layers):
            keys = layer.keys[0, :, :tokens]
            grouped = torch.cat(queries[index], dim=1).unflatten(0, (len(keys), -1))
            logits = torch.einsum("hgwd,htd->hgwt", grouped, keys) * keys.shape[-1] ** -0.5
            weights = logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            found["mean"].append(weights.mean(dim=1))
            found["max"].append(weights.amax(dim=1))
        return {heads: torch.stack(layers) for heads, layers in found.items()}

    def kept(self, choice: Guided, budget: float, done: int, before: int) -> torch.Tensor:
        """What is kept after ``done`` tokens of the answer, of which the last verification added those from ``before`` on: bool."""
        first = NEWEST + done - choice.window if choice.window else NEWEST + (before if done else -16)
        weights = self.attention[choice.heads][:, :, max(0, first) : NEWEST + done, : len(self.prompt) + done]
        scores = weights.mean(dim=2) if choice.rows == "mean" else weights.amax(dim=2)
        flat = scores.reshape(-1, 1, scores.shape[-1])
        scores = avg_pool1d(flat, choice.kernel, stride=1, padding=choice.kernel // 2).view_as(scores)
        scores[..., : choice.sinks] = float("inf")
        scores[..., scores.shape[-1] - choice.recent :] = float("inf")
        if choice.tail:
            return self._with_tail(kept_of(scores[..., : len(self.prompt)], budget, NOBODY_ELSE), done)
        return kept_of(scores, budget, NOBODY_ELSE)

    def fixed(self, budget: float, done: int) -> torch.Tensor:
        """What SnapKV keeps of the prompt, and all of the answer's ``done`` tokens: bool."""
        tokens, window = len(self.prompt), 32
        scores = self.attention["mean"][:, :, NEWEST - window : NEWEST, :tokens].mean(dim=2)
        scores[..., tokens - window :] = 0
        scores = avg_pool1d(scores.reshape(-1, 1, tokens), 5, stride=1, padding=2).view_as(scores)
        scores[..., tokens - window :] = float("inf")
        return self._with_tail(kept_of(scores, budget, NOBODY_ELSE), done)

    def _with_tail(self, kept: torch.Tensor, done: int) -> torch.Tensor:
        return torch.cat([kept, kept.new_ones(*kept.shape[:2], done)], dim=-1)

    def rounds(self, choice: Guided | None, budget: float) -> torch.Tensor:
        """Drafts accepted, drafts offered, tokens that a head reads of the context by round, rounds; None: SnapKV."""
        accepted = offered = read = rounds = done = before = 0
        while done < ANSWER - 1:
            some = self.answer[done : min(done + DRAFTS, ANSWER - 1)]
            kept = self.fixed(budget, done) if choice is None else self.kept(choice, budget, done, before)
            cache, tokens = DynamicCache(), len(self.prompt) + done
            for index, layer in enumerate(self.cache.layers):
                cache.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
            where = torch.arange(tokens, tokens + len(some))[None]
            self.watched.kept = kept
            logits = self.model(torch.tensor([some]), past_key_values=cache, position_ids=where).logits[0]
            self.watched.kept = None
            right = self.sampled(logits, done + 1) == torch.tensor(self.answer[done + 1 : done + 1 + len(some)])
            agreed = int(right.long().cumprod(0).sum())
            accepted, offered, read, rounds = accepted + agreed, offered + len(some), read + int(kept[0, 0].sum()), rounds + 1
            done, before = done + agreed + 1, done
        return torch.tensor([accepted, offered, read, rounds])


@torch.inference_mode()
def main() -> None:
    """Print accepted and offered drafts, and tokens read, by budget and choice, after each prompt."""
    parser = parser_of(__doc__, "choices", default=["snapkv", "window=32,recent=32"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budgets", default="0.25,0.125,0.0625", help="shares, separated by commas")
    args = parser.parse_args()
    watched = Watched()
    AttentionInterface.register(NAME, watched)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model, tokenizer = load(args.model, attn_implementation=NAME)
    budgets = [float(share) for share in args.budgets.split(",")]
    totals = {(budget, text): torch.zeros(4, dtype=torch.int64) for budget in budgets for text in args.choices}
    for seed, file in enumerate(prompts_in(args.prompts)):
        answered = Answered(model, watched, tokenizer.encode(file.read_text()), args.temperature, seed)
        for (budget, text), total in totals.items():
            total += answered.rounds(None if text == "snapkv" else Guided.of(text), budget)
        print(file.name, flush=True)
    for (budget, text), total in totals.items():
        accepted, offered, read, rounds = total.tolist()
        print(f"{budget:g} {text}: {accepted}/{offered} {accepted / offered:.3f}, {read / rounds:.0f} tokens read")


if __name__ == "__main__":
    main()
