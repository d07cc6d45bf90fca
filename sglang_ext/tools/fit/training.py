"""Trains one layer's network, from the states that enter attention to the logarithm of KVzip's score, with squared error."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import gelu, linear, mse_loss


@dataclass(frozen=True)
class TrainingConfig:
    """Training settings (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891).

    Attributes:
        network: ``mlp``, two layers with GELU between them, or ``linear``, by ridge regression.
        width: Size of the hidden layer. 0 for an eighth of the model's hidden size.
        epochs, batch, rate: Settings of AdamW. Its learning rate decreases to 0 along a cosine.
        ridge: Added to the variance of standardized inputs.
        seed: Seed of the initial weights and of the order of samples.
    """

    network: str = "mlp"
    width: int = 0
    epochs: int = 15
    batch: int = 512
    rate: float = 2e-3
    ridge: float = 1e-3
    seed: int = 0

    @property
    def settings(self) -> str:
        """The settings as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Standardizer:
    """Mean and standard deviation of columns: float32 [columns]."""

    mean: torch.Tensor
    deviation: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> "Standardizer":
        """Create from ``values``, [rows, columns]. Constant columns are not scaled."""
        deviation = values.std(dim=0)
        return cls(values.mean(dim=0), torch.where(deviation > 1e-6, deviation, 1.0))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` with mean 0 and deviation 1."""
        return (values - self.mean) / self.deviation

    def before(self, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert a linear map of standardized inputs to one of raw inputs."""
        weight = weight / self.deviation
        return weight, bias - weight @ self.mean

    def after(self, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert a linear map to standardized outputs to one to raw outputs."""
        return weight * self.deviation[:, None], bias * self.deviation + self.mean


def train(states: torch.Tensor, targets: torch.Tensor, how: TrainingConfig, layer: int) -> dict[str, torch.Tensor]:
    """Train one layer. Return its weights, with the names of :class:`~sglang_ext.mem_cache.scores.Predictor`, on the CPU.

    Args:
        states: float32 [samples, hidden_size].
        targets: float32 [samples, kv_heads].
        how: The settings.
        layer: Its index. Each layer has its own random numbers.
    """
    inputs, outputs = Standardizer.of(states), Standardizer.of(targets)
    if how.network == "linear":
        outer = inputs.before(*outputs.after(*_regression(inputs(states), outputs(targets), how.ridge)))
        found = {"outer": outer[0], "outer_bias": outer[1]}
    else:
        weights = _descend(inputs(states), outputs(targets), how, layer)
        inner, outer = inputs.before(*weights[:2]), outputs.after(*weights[2:])
        found = {"outer": outer[0], "outer_bias": outer[1], "inner": inner[0], "inner_bias": inner[1]}
    return {name: tensor.cpu() for name, tensor in found.items()}


def _regression(inputs: torch.Tensor, outputs: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ridge regression of standardized values: weight and bias."""
    gram = (inputs.t() @ inputs).double() / len(inputs)
    gram.diagonal().add_(ridge)
    weight = torch.linalg.solve(gram, (inputs.t() @ outputs).double() / len(inputs)).t().float()
    return weight, weight.new_zeros(len(weight))


def _descend(inputs: torch.Tensor, outputs: torch.Tensor, how: TrainingConfig, layer: int) -> list[torch.Tensor]:
    """AdamW on batches: weights and biases of both layers."""
    generator = torch.Generator().manual_seed(how.seed + layer)
    sizes = inputs.shape[1], how.width or max(1, inputs.shape[1] // 8), outputs.shape[1]
    weights = [tensor.to(inputs.device).requires_grad_() for tensor in _first_weights(sizes, generator)]
    optimizer = torch.optim.AdamW(weights, lr=how.rate)
    steps = how.epochs * math.ceil(len(inputs) / how.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for rows in _batches(len(inputs), how, generator):
        rows = rows.to(inputs.device)
        hidden = gelu(linear(inputs[rows], *weights[:2]))
        loss = mse_loss(linear(hidden, *weights[2:]), outputs[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return [tensor.detach() for tensor in weights]


def _first_weights(sizes: tuple[int, int, int], generator: torch.Generator) -> Iterator[torch.Tensor]:
    for before, after in zip(sizes, sizes[1:]):
        yield torch.randn(after, before, generator=generator) / before**0.5
        yield torch.zeros(after)


def _batches(samples: int, how: TrainingConfig, generator: torch.Generator) -> Iterator[torch.Tensor]:
    for _ in range(how.epochs):
        yield from torch.randperm(samples, generator=generator).split(how.batch)


def evaluate(predicted: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Mean squared error of predictions, and R^2 as the mean over KV heads. Both arguments are [samples, kv_heads]."""
    errors = (predicted - targets).square().mean(dim=0)
    variance = targets.var(dim=0, correction=0).clamp(min=1e-12)
    return float(errors.mean()), float((1 - errors / variance).mean())
