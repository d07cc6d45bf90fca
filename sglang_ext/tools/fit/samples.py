"""Training data of a predictor: sampled tokens of texts, with the hidden states that enter attention and KVzip's scores of them."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sglang_ext.mem_cache.scores import is_whole, write_checked
from sglang_ext.tools.precompress.reconstruction import AttentionInputs
from sglang_ext.tools.precompress.job import PromptPrefix, read_text
from sglang_ext.tools.precompress.reconstruction import (
    ReconstructionConfig,
    reconstruction_scores,
)

FORMAT = "1"
# Shorter pieces of a text are skipped: KVzip's scores depend on the number of tokens to attend to.
MIN_TOKENS = 128
# Below all scores that are not 0.
FLOOR = 1e-12


@dataclass(frozen=True)
class SamplingConfig:
    """Settings that samples depend on, in addition to the texts and the model.

    Attributes:
        target: ``kvzip+``, as published, or ``kvzip``.
        tokens: Tokens per repeated piece. Longer texts are split.
        samples: Sampled tokens per piece. Limits the stored data.
        seed: Seed of the sampling.
        how: How pieces are repeated.
    """

    target: str = "kvzip+"
    tokens: int = 1024
    samples: int = 512
    seed: int = 0
    how: ReconstructionConfig = field(default_factory=ReconstructionConfig)

    @property
    def settings(self) -> str:
        """The settings as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class TextPiece:
    """Tokens of a text that are repeated at once.

    Attributes:
        tokens: Token ids.
        path: File of their samples, named by a hash of everything that they depend on. It contains ``states``, [layers, samples,
            hidden_size] in the model's dtype, and ``targets``, float32 [layers, kv_heads, samples], logarithms of scores.
    """

    tokens: tuple[int, ...]
    path: Path

    @property
    def is_sampled(self) -> bool:
        """Whether the file of its samples exists and is complete."""
        return self.path.exists() and is_whole(self.path)


@dataclass(frozen=True)
class Sampler:
    """Takes samples of texts.

    Attributes:
        tokenizer: The model's tokenizer.
        model: The model's key.
        sampling: The settings.
        out: The folder of samples.
    """

    tokenizer: PreTrainedTokenizerBase
    model: str
    sampling: SamplingConfig
    out: Path

    def pieces(self, file: Path) -> list[TextPiece]:
        """Split a text into pieces.

        Raises:
            PrecompressError: It cannot be read.
        """
        tokens, most = PromptPrefix().tokens(self.tokenizer, read_text(file)), self.sampling.tokens
        parts = (tuple(tokens[begin : begin + most]) for begin in range(0, len(tokens), most))
        return [TextPiece(part, self._path(part)) for part in parts if len(part) >= MIN_TOKENS]

    def _path(self, tokens: tuple[int, ...]) -> Path:
        key = json.dumps([FORMAT, self.model, self.sampling.settings, tokens])
        return self.out / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"

    def take(self, model: PreTrainedModel, piece: TextPiece, progress: Callable[[int], None]) -> None:
        """Score a piece and store samples of it. Calls ``progress`` with numbers of computed or repeated tokens.

        Raises:
            PrecompressError: The model's layers are of an unknown kind.
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
        """Sampled positions, ascending. Sinks have no score."""
        generator = torch.Generator().manual_seed(self.sampling.seed + int(piece.path.stem[:8], 16))
        sinks = self.sampling.how.sinks
        drawn = torch.randperm(len(piece.tokens) - sinks, generator=generator)[: self.sampling.samples]
        return drawn.sort().values + sinks

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def load_layer(paths: list[Path], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one layer's samples from several files: states [samples, hidden_size] and targets [samples, kv_heads], float32."""
    states, targets = [], []
    for path in paths:
        with safe_open(path, "pt") as opened:
            states.append(opened.get_slice("states")[layer].float())
            targets.append(opened.get_slice("targets")[layer].t())
    return torch.cat(states), torch.cat(targets)
