"""What a predictor learns from: sampled tokens of texts, with the states that enter attention and KVzip's scores of them."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sglang_ext.mem_cache.scores.checked_file import is_whole, write_checked
from sglang_ext.tools.precompress.attention_inputs import AttentionInputs
from sglang_ext.tools.precompress.documents import PromptPrefix, read_text
from sglang_ext.tools.precompress.reconstruction import ReconstructionConfig, reconstruction_scores

FORMAT = "1"
# Shorter pieces of a text are left out: KVzip's scores depend on how much there is to attend to.
MIN_TOKENS = 128
# Below every score that is not 0.
FLOOR = 1e-12


@dataclass(frozen=True)
class SamplingConfig:
    """What samples depend on, beside the texts and the model.

    Attributes:
        target: ``kvzip+``, as published, or ``kvzip``.
        tokens: of a piece that is repeated; longer texts are cut.
        samples: tokens of a piece that are learned from; bounds what is stored.
        seed: which these are.
        how: how pieces are repeated.
    """

    target: str = "kvzip+"
    tokens: int = 1024
    samples: int = 512
    seed: int = 0
    how: ReconstructionConfig = field(default_factory=ReconstructionConfig)

    @property
    def settings(self) -> str:
        """As JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class TextPiece:
    """Tokens of a text that are repeated at once.

    Attributes:
        tokens: token ids.
        path: where their samples lie, named by all that they depend on: ``states``, [layers, samples, hidden_size] in the
            model's dtype, and ``targets``, float32 [layers, kv_heads, samples], logarithms of scores.
    """

    tokens: tuple[int, ...]
    path: Path

    @property
    def is_sampled(self) -> bool:
        """Whether its samples are there, whole."""
        return self.path.exists() and is_whole(self.path)


@dataclass(frozen=True)
class Sampler:
    """Takes samples of texts.

    Attributes:
        tokenizer: the model's.
        model: the model's key.
        sampling: the settings.
        out: the folder of samples.
    """

    tokenizer: PreTrainedTokenizerBase
    model: str
    sampling: SamplingConfig
    out: Path

    def pieces(self, file: Path) -> list[TextPiece]:
        """Pieces of a text.

        Raises:
            PrecompressError: it cannot be read.
        """
        tokens, most = PromptPrefix().tokens(self.tokenizer, read_text(file)), self.sampling.tokens
        parts = (tuple(tokens[begin : begin + most]) for begin in range(0, len(tokens), most))
        return [TextPiece(part, self._path(part)) for part in parts if len(part) >= MIN_TOKENS]

    def _path(self, tokens: tuple[int, ...]) -> Path:
        key = json.dumps([FORMAT, self.model, self.sampling.settings, tokens])
        return self.out / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"

    def take(self, model: PreTrainedModel, piece: TextPiece, progress: Callable[[int], None]) -> None:
        """Score a piece and store samples of it; ``progress`` is told of tokens that were computed or repeated.

        Raises:
            PrecompressError: the model's layers are of an unknown kind.
        """
        how, settings = self.sampling.how, self.sampling
        positions = self._positions(piece)
        inputs = AttentionInputs(model.config.get_text_config().num_hidden_layers, positions)
        suffix = PromptPrefix().suffix(self.tokenizer)
        watch = inputs if settings.target == "kvzip+" else None
        with inputs.record_inputs(model):
            scores = reconstruction_scores(model, self._encode, list(piece.tokens), suffix, how, progress, watch)
        targets = scores[..., positions.to(scores.device)].clamp(min=FLOOR).log().cpu()
        write_checked(piece.path, {"states": inputs.kept(), "targets": targets}, {"format": FORMAT})

    def _positions(self, piece: TextPiece) -> torch.Tensor:
        """Sampled positions, ascending; sinks have no score."""
        generator = torch.Generator().manual_seed(self.sampling.seed + int(piece.path.stem[:8], 16))
        sinks = self.sampling.how.sinks
        drawn = torch.randperm(len(piece.tokens) - sinks, generator=generator)[: self.sampling.samples]
        return drawn.sort().values + sinks

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def load_layer(paths: list[Path], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's samples out of several files: states [samples, hidden_size] and targets [samples, kv_heads], float32."""
    states, targets = [], []
    for path in paths:
        with safe_open(path, "pt") as opened:
            states.append(opened.get_slice("states")[layer].float())
            targets.append(opened.get_slice("targets")[layer].t())
    return torch.cat(states), torch.cat(targets)
