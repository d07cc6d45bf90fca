"""How many greedy drafts full KV accepts when tokens are chosen for each step, by how they are, without a server: docs/benchmarks.md.

    python docs/benchmarks/selection_acceptance.py --model MODEL --prompts FOLDER [--share S] [--every N] [WAYS...]

Rounds are those of --kv-compressor spade: a choice before each, by queries of full KV, and one after every N steps, by those of drafts; true
and quest wait for each layer's own query instead.
"""

import torch
from on_prompts import load, parser_of, prompts_in
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.selection.baselines import BASELINES
from sglang_ext.mem_cache.selection.predictors import Current, Regressed
from sglang_ext.mem_cache.selection.scoring import ByPrediction, Scoring, Seen
from sglang_ext.mem_cache.selection.top_tokens import top_tokens

DRAFTS, ANSWER, WINDOW, NAME = 16, 96, 17, "selection_acceptance"
WAYS: dict[str, Scoring] = {each.name: each for each in (ByPrediction(Current()), ByPrediction(Regressed()), *BASELINES)}


class Selecting:
    """An attention function of transformers, over what is chosen of a context where something is.

    Attributes:
        rotary: the model's.
        noted: queries of each layer, [heads, tokens, head_dim], the newest last.
        end: position after the newest that was noted, where the forward that runs began.
        chosen: bool [kv_heads, covered] by layer; None to see all.
        way, count, covered: how tokens are chosen, how many, and of how many.
    """

    def __init__(self, rotary: Rotary) -> None:
        self.rotary, self.noted, self.end = rotary, {}, 0
        self.chosen: dict[int, torch.Tensor] | None = None

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention of [1, heads, tokens, head_dim]."""
        layer, count = module.layer_idx, query.shape[2]
        known = [self.noted[layer]] if layer in self.noted else []
        self.noted[layer] = torch.cat([*known, query[0]], dim=1)[:, -WINDOW - ANSWER :]
        if self.chosen is not None:
            if self.way.synchronous:
                self.choose(layer, key[0], self.end + count)
            kept = self.chosen[layer]
            tail = kept.new_ones(len(kept), key.shape[2] - kept.shape[1])
            whole = torch.cat([kept, tail], dim=-1).repeat_interleave(query.shape[1] // len(kept), dim=0)
            attention_mask = whole[None, :, None]
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def choose(self, layer: int, keys: torch.Tensor, end: int) -> None:
        """Choose of ``keys``, [kv_heads, at least covered, head_dim], by the queries noted, of tokens before position ``end``."""
        queries = self.noted[layer][:, -WINDOW:]
        positions = torch.arange(end - queries.shape[1], end)
        keys = keys[:, : self.covered]
        seen = Seen(queries[None, None], positions[None], keys[None, None], keys.shape[-1] ** -0.5, self.rotary)
        best = top_tokens(self.way.scores(seen), self.count, Spade.sinks, Spade.recent)[0, 0]
        self.chosen[layer] = torch.zeros(keys.shape[:2], dtype=torch.bool).scatter_(-1, best, True)


class Answered:
    """A prompt's greedy answer, its full KV, and the queries of its tokens."""

    def __init__(self, model: PreTrainedModel, selecting: Selecting, prompt: list[int]) -> None:
        self.model, self.selecting, self.prompt, self.cache = model, selecting, prompt, DynamicCache()
        selecting.noted, self.answer, following = {}, [], prompt
        while len(self.answer) < ANSWER:
            logits = model(torch.tensor([following]), past_key_values=self.cache, logits_to_keep=1).logits
            following = [int(logits[0, -1].argmax())]
            self.answer += following
        self.queries = selecting.noted

    def rounds(self, way: Scoring, share: float, every: int) -> tuple[int, int]:
        """Drafts that are accepted, and offered, over the whole answer."""
        accepted = offered = done = 0
        while done < ANSWER - 1:
            most = min(DRAFTS, ANSWER - 1 - done)
            agreed = self._round(way, share, every, done, most)
            accepted, offered, done = accepted + agreed, offered + most, done + agreed + 1
        return accepted, offered

    def _round(self, way: Scoring, share: float, every: int, done: int, most: int) -> int:
        """Of ``most`` drafts after ``done`` tokens of the answer those up to the first wrong one; what follows it needs no look."""
        selecting, tokens, cache = self.selecting, len(self.prompt) + done, DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
        before = next(iter(self.queries.values())).shape[1] - (ANSWER - 1 - done)
        selecting.noted = {layer: queries[:, :before] for layer, queries in self.queries.items()}
        selecting.way, selecting.count, selecting.covered, selecting.chosen = way, int(share * tokens), tokens, {}
        for step in range(most):
            selecting.end = tokens + step
            if not way.synchronous and step % every == 0:
                for index, layer in enumerate(cache.layers):
                    selecting.choose(index, layer.keys[0], selecting.end)
            where = torch.tensor([[selecting.end]])
            logits = self.model(torch.tensor([[self.answer[done + step]]]), past_key_values=cache, position_ids=where).logits
            if int(logits[0, -1].argmax()) != self.answer[done + step + 1]:
                break
        else:
            step = most
        selecting.chosen = None
        return step


@torch.inference_mode()
def main() -> None:
    """Print accepted and offered drafts by way to choose, after each prompt."""
    parser = parser_of(__doc__, "ways", default=["current", "regressed", "true", "quest"], help=f"of {', '.join(WAYS)}")
    parser.add_argument("--share", type=float, default=0.125, help="of the context, that each KV head reads")
    parser.add_argument("--every", type=int, default=1, help="steps after which tokens are chosen anew")
    args = parser.parse_args()
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(NAME, sdpa_attention_forward)
    model, tokenizer = load(args.model, attn_implementation=NAME)
    selecting = Selecting(Rotary(model.model.rotary_emb.inv_freq.float()))
    AttentionInterface.register(NAME, selecting)
    counts = {way: [0, 0] for way in args.ways}
    for file in prompts_in(args.prompts):
        answered = Answered(model, selecting, tokenizer.encode(file.read_text()))
        for way, total in counts.items():
            total[:] = (before + more for before, more in zip(total, answered.rounds(WAYS[way], args.share, args.every)))
        print(file.name, {way: f"{a}/{o} {a / o:.3f}" for way, (a, o) in counts.items()}, flush=True)


if __name__ == "__main__":
    main()
