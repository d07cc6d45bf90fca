"""A small network per layer that predicts how much each KV head needs a token (KVzap, arXiv 2601.07891)."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import gelu, linear

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.scores.checked_file import CheckedFileError, read_checked, write_checked

FORMAT, FILE = "1", "predictor.safetensors"


@dataclass(frozen=True)
class FitRecord:
    """How a predictor was fitted.

    Attributes:
        model: The key of its model (model_key.py).
        settings: Settings of targets and training, as JSON with sorted keys.
        texts: Number of texts that it was fitted on.
        tokens: Number of tokens sampled from the texts.
        loss: By layer, mean squared error of the logarithm of the score, on held-out texts.
        r2: By layer, explained share of that logarithm's variance on held-out texts, mean over KV heads.
    """

    model: str
    settings: str
    texts: int
    tokens: int
    loss: tuple[float, ...]
    r2: tuple[float, ...]


@dataclass(frozen=True)
class Predictor:
    """Predicts the logarithm of KVzip's score from the hidden states that enter attention.

    Attributes:
        outer: [layers, kv_heads, width], or [layers, kv_heads, hidden_size] without an inner layer.
        outer_bias: [layers, kv_heads].
        inner: [layers, width, hidden_size], followed by GELU; None for a linear predictor.
        inner_bias: [layers, width].
        fitted: How it was fitted.
    """

    outer: torch.Tensor
    outer_bias: torch.Tensor
    fitted: FitRecord
    inner: torch.Tensor | None = None
    inner_bias: torch.Tensor | None = None

    @property
    def layers(self) -> int:
        """Number of attention layers of its model."""
        return self.outer.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads per layer that it scores."""
        return self.outer.shape[1]

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that it reads."""
        return (self.outer if self.inner is None else self.inner).shape[-1]

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def __call__(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Scores of tokens from their hidden states, [tokens, hidden_size]: float32 [tokens, kv_heads].

        The outer layer is computed in float32: bfloat16 cannot distinguish scores that differ by less than half a percent.
        """
        if self.inner is not None:
            states = gelu(linear(states.to(self.inner.dtype), self.inner[layer], self.inner_bias[layer]))
        return linear(states.float(), self.outer[layer], self.outer_bias[layer])

    def of_heads(self, first: int, count: int) -> "Predictor":
        """The predictor for ``count`` KV heads from ``first`` on."""
        heads = slice(first, first + count)
        return replace(self, outer=self.outer[:, heads].contiguous(), outer_bias=self.outer_bias[:, heads].contiguous())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Predictor":
        """The predictor on a device, with the inner layer in ``dtype``."""
        inner = [tensor if tensor is None else tensor.to(device, dtype) for tensor in (self.inner, self.inner_bias)]
        return Predictor(self.outer.to(device), self.outer_bias.to(device), self.fitted, *inner)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"outer": self.outer, "outer_bias": self.outer_bias, "inner": self.inner, "inner_bias": self.inner_bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def write(self, folder: Path) -> Path:
        """Store the predictor. The file appears only when it is complete.

        Raises:
            OSError: The folder cannot be written.
        """
        fitted = json.dumps(asdict(self.fitted), sort_keys=True)
        write_checked(folder / FILE, self._tensors(), {"format": FORMAT, "fitted": fitted})
        return folder / FILE

    @classmethod
    def read(cls, folder: Path, model: str) -> "Predictor":
        """Read the predictor in ``folder`` for the model with this key.

        Raises:
            OptionError: There is none, it has changed, or it belongs to another model or version.
        """
        try:
            tensors, metadata = read_checked(folder / FILE)
        except CheckedFileError as error:
            raise _refused(folder, str(error)) from error
        if metadata.get("format") != FORMAT:
            raise _refused(folder, f"it has format {metadata.get('format')!r}, this version reads {FORMAT!r}")
        fitted = json.loads(metadata["fitted"])
        found = cls(**tensors, fitted=FitRecord(**{**fitted, "loss": tuple(fitted["loss"]), "r2": tuple(fitted["r2"])}))
        if found.fitted.model != model:
            raise _refused(folder, f"it was fitted to another model: {found.fitted.model}, not {model}")
        return found


def _refused(folder: Path, reason: str) -> OptionError:
    return OptionError(
        f"--kv-predictor is {str(folder)!r}, which has no predictor for this model: {reason}; make it with "
        "python -m sglang_ext.fit kvzap --model MODEL --out FOLDER TEXTS"
    )
