"""The steps of a fit. Each writes a complete file: samples of a piece of text, a layer's network, the predictor."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from sglang_ext.mem_cache.scores import CheckedFileError, FitRecord, Predictor, read_checked, write_checked
from sglang_ext.tools.fit import FitError
from sglang_ext.tools.fit.samples import MIN_TOKENS, Sampler, TextPiece, load_layer
from sglang_ext.tools.fit.training import TrainingConfig, evaluate, train


@dataclass(frozen=True)
class TextSplit:
    """The pieces of all texts, divided into a training side and a held-out side. All pieces of a text are on one side.

    Attributes:
        learned: Files of samples that networks are fitted to.
        held: Files of samples for evaluation.
        texts: Number of texts on the training side.
    """

    learned: list[Path]
    held: list[Path]
    texts: int


def split(texts: list[list[TextPiece]], share: float) -> TextSplit:
    """Hold out a ``share`` of the texts, at least one, selected by hash.

    Raises:
        FitError: Fewer than two texts are long enough.
    """
    named = sorted({tuple(sorted(piece.path for piece in pieces)) for pieces in texts if pieces})
    if len(named) < 2:
        raise FitError(
            f"{len(named)} texts have {MIN_TOKENS} tokens or more; one is held out for evaluation: pass at least two"
        )
    count = min(len(named) - 1, max(1, round(share * len(named))))
    held, learned = ({path for paths in some for path in paths} for some in (named[:count], named[count:]))
    return TextSplit(sorted(learned - held), sorted(held), len(named) - count)


@dataclass(frozen=True)
class FitJob:
    """Fits a predictor to samples.

    Attributes:
        sampler: The sampler that wrote the samples.
        training: The training settings.
        split: Training and held-out samples.
        layers: Layers of the model.
        device: Device of the training.
    """

    sampler: Sampler
    training: TrainingConfig
    split: TextSplit
    layers: int
    device: torch.device

    @property
    def settings(self) -> str:
        """Settings of samples and training, as JSON with sorted keys."""
        names = [[path.name for path in side] for side in (self.split.learned, self.split.held)]
        texts = blake2b(json.dumps(names).encode(), digest_size=16)
        parts = {"sampling": json.loads(self.sampler.sampling.settings), "training": json.loads(self.training.settings)}
        return json.dumps({**parts, "samples": texts.hexdigest()}, sort_keys=True)

    def run(self, progress: Callable[[], None]) -> Predictor:
        """Fit and return the predictor. Calls ``progress`` after each layer. Layers of an interrupted run are reused."""
        networks, loss, r2 = [], [], []
        for layer in range(self.layers):
            tensors, metadata = self._layer(layer)
            networks.append(tensors)
            loss.append(float(metadata["loss"]))
            r2.append(float(metadata["r2"]))
            progress()
        tokens = sum(len(read_checked(path)[0]["targets"][0, 0]) for path in self.split.learned)
        fitted = FitRecord(self.sampler.model, self.settings, self.split.texts, tokens, tuple(loss), tuple(r2))
        return Predictor(**{name: torch.stack([of[name] for of in networks]) for name in networks[0]}, fitted=fitted)

    def _layer(self, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Fit a layer. Return its weights, and their evaluation."""
        name = blake2b(f"{self.sampler.model}/{self.settings}/{layer}".encode(), digest_size=16).hexdigest()
        path = self.sampler.out / f"layer-{name}.safetensors"
        try:
            return read_checked(path)
        except CheckedFileError:
            tensors = train(*self._samples(self.split.learned, layer), self.training, layer)
            states, targets = load_layer(self.split.held, layer)
            one = Predictor(**{name: tensor[None] for name, tensor in tensors.items()}, fitted=FitRecord("", "", 0, 0, (), ()))
            loss, r2 = evaluate(one(0, states), targets)
            write_checked(path, tensors, {"loss": repr(loss), "r2": repr(r2)})
            return read_checked(path)

    def _samples(self, paths: list[Path], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        states, targets = load_layer(paths, layer)
        return states.to(self.device), targets.to(self.device)
