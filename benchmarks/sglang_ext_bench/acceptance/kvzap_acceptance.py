"""How many greedy drafts full KV accepts, by compressor, without a server: docs/benchmarks.md.

    sglang-ext-bench kvzap-acceptance --model MODEL --prompts FOLDER --predictor FOLDER [METHODS...]

Each round drafts on the compressed prompt and the exact KV of what was answered since. Drafts up to the first wrong one see
the same tokens as if the answer's were fed, so that one forward of so many tokens tells how many are right.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from sglang_ext_bench.acceptance.on_prompts import load, parser_of, prompts_in
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sglang_ext.mem_cache.compressors import LayerKV, top_positions
from sglang_ext.mem_cache.compressors.snapkv import SnapKV
from sglang_ext.mem_cache.scores.model_key import model_key
from sglang_ext.mem_cache.scores.predictor import Predictor
from sglang_ext.tools.precompress.attention_inputs import (
    AttentionInputs,
    attention_layers,
)
from sglang_ext.tools.precompress.documents import PromptPrefix
from sglang_ext.tools.precompress.reconstruction import (
    ReconstructionConfig,
    reconstruction_scores,
)

BUDGETS, DRAFTS, ANSWER, SINKS, RECENT = (0.5, 0.25, 0.125), 16, 96, 4, 32


class Context:
    """A prompt's full KV, what entered attention, and the greedy answer with its full KV."""

    def __init__(self, model: PreTrainedModel, prompt: list[int]) -> None:
        self.model, self.prompt, self.cache = model, prompt, DynamicCache()
        inputs = AttentionInputs(model.config.num_hidden_layers, torch.arange(len(prompt)))
        with inputs.record_inputs(model):
            logits = model(torch.tensor([prompt]), past_key_values=self.cache, logits_to_keep=1).logits
        self.states = inputs.kept()
        self.answer = [int(logits[0, -1].argmax())]
        while len(self.answer) < ANSWER:
            logits = model(torch.tensor([self.answer[-1:]]), past_key_values=self.cache).logits
            self.answer.append(int(logits[0, -1].argmax()))

    def layers(self, window: int) -> list[LayerKV]:
        """Each layer as a compressor sees it."""
        tokens = len(self.prompt)
        positions = torch.arange(tokens - window, tokens)
        turns = self.model.model.rotary_emb(self.states[:1], positions[None])
        found = []
        for index, (module, kv) in enumerate(zip(attention_layers(self.model), self.cache.layers)):
            queries = module.q_proj(self.states[index, None, -window:]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            queries, _ = apply_rotary_pos_emb(queries, queries, *turns)
            keys, values = (tensor[0, :, :tokens].transpose(0, 1) for tensor in (kv.keys, kv.values))
            found.append(LayerKV(keys, values, queries[0].transpose(0, 1), positions, module.scaling, index))
        return found

    def accepted(self, scores: torch.Tensor, budget: float) -> tuple[int, int]:
        """Drafts that are accepted, and offered, over the whole answer."""
        kept = top_positions(scores, int(len(self.prompt) * budget))
        return self.rounds(lambda done: self._compressed(kept, done))

    def rounds(self, cache_of: Callable[[int], DynamicCache]) -> tuple[int, int]:
        """Drafts that are accepted, and offered; ``cache_of``: what those after so many tokens of the answer attend to."""
        accepted = offered = done = 0
        while done < ANSWER - 1:
            some = self.answer[done : min(done + DRAFTS, ANSWER - 1)]
            where = torch.arange(len(self.prompt) + done, len(self.prompt) + done + len(some))[None]
            logits = self.model(torch.tensor([some]), past_key_values=cache_of(done), position_ids=where).logits
            right = logits[0].argmax(dim=-1) == torch.tensor(self.answer[done + 1 : done + 1 + len(some)])
            agreed = int(right.long().cumprod(0).sum())
            accepted, offered, done = accepted + agreed, offered + len(some), done + agreed + 1
        return accepted, offered

    def whole(self, done: int) -> DynamicCache:
        """The full KV of the prompt, and of the answer's ``done`` tokens."""
        cache, tokens = DynamicCache(), len(self.prompt) + done
        for index, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
        return cache

    def _compressed(self, kept: torch.Tensor, done: int) -> DynamicCache:
        """What ``kept``, int64 [layers, kv_heads, count], leaves of the prompt, and all of the answer's ``done`` tokens."""
        cache, tokens = DynamicCache(), len(self.prompt)
        for index, (layer, of_layer) in enumerate(zip(self.cache.layers, kept)):
            parts = []
            for full in (layer.keys, layer.values):
                chosen = full[0].gather(1, of_layer[..., None].expand(-1, -1, full.shape[-1]))
                parts.append(torch.cat([chosen[None], full[:, :, tokens : tokens + done]], dim=2))
            cache.update(*parts, index)
        return cache


def scores_of(method: str, context: Context, tokenizer: PreTrainedTokenizerBase, predictor: Predictor | None) -> torch.Tensor:
    """A method's scores of the prompt: float32 [layers, kv_heads, tokens]."""
    if method == "snapkv":
        return torch.stack([SnapKV().scores(layer) for layer in context.layers(SnapKV.window)])
    if method == "kvzap":
        scores = torch.stack([predictor(layer, states).t() for layer, states in enumerate(context.states)])
        scores[..., -RECENT:] = float("inf")
    else:
        suffix = PromptPrefix().suffix(tokenizer)
        inputs = AttentionInputs(context.model.config.num_hidden_layers, torch.empty(0, dtype=torch.int64))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        with inputs.record_inputs(context.model):
            plus = inputs if method == "kvzip+" else None
            scores = reconstruction_scores(context.model, encode, context.prompt, suffix, ReconstructionConfig(), inputs=plus)
        context.model.set_attn_implementation("sdpa")
    scores[..., :SINKS] = float("inf")
    return scores


@torch.inference_mode()
def main() -> None:
    """Print accepted and offered drafts by method and budget, after each prompt."""
    parser = parser_of(__doc__, "methods", default=["snapkv", "kvzip", "kvzap"], help="of these and kvzip+")
    parser.add_argument("--predictor", type=Path, help="for kvzap")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    predictor = Predictor.read(args.predictor, model_key(args.model)) if args.predictor else None
    counts = {(method, budget): [0, 0] for method in args.methods for budget in BUDGETS}
    for file in prompts_in(args.prompts):
        context = Context(model, tokenizer.encode(file.read_text()))
        for method in args.methods:
            scores = scores_of(method, context, tokenizer, predictor)
            for budget in BUDGETS:
                found = context.accepted(scores, budget)
                counts[method, budget] = [total + more for total, more in zip(counts[method, budget], found)]
        print(file.name, {name: f"{a}/{o} {a / o:.3f}" for name, (a, o) in counts.items()}, flush=True)


if __name__ == "__main__":
    main()
