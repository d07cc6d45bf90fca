"""Fit a predictor of KVzip's scores to a model, for ``--kv-compressor kvzap``.

    python -m sglang_ext.fit kvzap --model MODEL --out FOLDER TEXTS...

A server started with ``--kv-compressor kvzap --kv-predictor FOLDER`` then predicts the score of each token when it computes its KV. An
interrupted run can be resumed. FOLDER/work contains samples and may be deleted afterwards.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch.nn.functional import gelu, linear, mse_loss
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sglang_ext.mem_cache.scores import CheckedFileError, FitRecord, Predictor, is_whole, model_folder, model_key, read_checked, write_checked
from sglang_ext.tools import CommandError, check_folder, exit_code, show_progress
from sglang_ext.tools.reconstruction import AttentionInputs, PromptPrefix, ReconstructionConfig, check_device, read_text, reconstruction_scores

FORMAT = "1"
# Shorter pieces of a text are skipped: KVzip's scores depend on the number of tokens to attend to.
MIN_TOKENS = 128
# Below all scores that are not 0.
FLOOR = 1e-12
# Least values of options.
SMALLEST = {"tokens": 128, "samples": 1, "width": 0, "epochs": 1, "seed": 0}


@dataclass(frozen=True)
class SamplingConfig:
    """Settings that samples depend on, in addition to the texts and the model.

    ``target`` is ``kvzip+``, as published, or ``kvzip``. Texts are split into pieces of ``tokens`` tokens, which are repeated as ``how`` says,
    and of which ``samples`` are drawn.
    """

    target: str = "kvzip+"
    tokens: int = 1024
    samples: int = 512
    seed: int = 0
    how: ReconstructionConfig = field(default_factory=ReconstructionConfig)


@dataclass(frozen=True)
class TextPiece:
    """Token ids of a text that are repeated at once.

    The file of their samples is named by a hash of everything that they depend on. It contains ``states``, [layers, samples, hidden_size] in
    the model's dtype, and ``targets``, float32 [layers, kv_heads, samples], logarithms of scores.
    """

    tokens: tuple[int, ...]
    path: Path


@dataclass(frozen=True)
class Sampler:
    """Takes samples of texts. ``model`` is the model's key, ``out`` the folder of samples."""

    tokenizer: PreTrainedTokenizerBase
    model: str
    sampling: SamplingConfig
    out: Path

    def pieces(self, file: Path) -> list[TextPiece]:
        """Split a text into pieces. Raises ``CommandError`` if it cannot be read."""
        tokens, most = PromptPrefix().tokens(self.tokenizer, read_text(file)), self.sampling.tokens
        parts = (tuple(tokens[begin : begin + most]) for begin in range(0, len(tokens), most))
        return [TextPiece(part, self._path(part)) for part in parts if len(part) >= MIN_TOKENS]

    def _path(self, tokens: tuple[int, ...]) -> Path:
        settings = json.dumps(asdict(self.sampling), sort_keys=True)
        return self.out / f"{_short_hash(json.dumps([FORMAT, self.model, settings, tokens]))}.safetensors"

    def take(self, model: PreTrainedModel, piece: TextPiece, progress: Callable[[int], None]) -> None:
        """Score a piece and store samples of it. Calls ``progress`` with numbers of computed or repeated tokens.

        Raises ``CommandError`` if the model's layers are of an unknown kind.
        """
        how = self.sampling.how
        # Sampled positions, ascending. Sinks have no score.
        generator = torch.Generator().manual_seed(self.sampling.seed + int(piece.path.stem[:8], 16))
        drawn = torch.randperm(len(piece.tokens) - how.sinks, generator=generator)[: self.sampling.samples]
        positions = drawn.sort().values + how.sinks
        inputs = AttentionInputs(model.config.get_text_config().num_hidden_layers, positions)
        encode, suffix = partial(self.tokenizer.encode, add_special_tokens=False), PromptPrefix().suffix(self.tokenizer)
        watch = inputs if self.sampling.target == "kvzip+" else None
        with inputs.record_inputs(model):
            scores = reconstruction_scores(model, encode, list(piece.tokens), suffix, how, progress, watch)
        targets = scores[..., positions.to(scores.device)].clamp(min=FLOOR).log().cpu()
        write_checked(piece.path, {"states": inputs.kept(), "targets": targets}, {"format": FORMAT})


def _short_hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()


def load_layer(paths: list[Path], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one layer's samples from several files: states [samples, hidden_size] and targets [samples, kv_heads], float32."""
    states, targets = [], []
    for path in paths:
        with safe_open(path, "pt") as opened:
            states.append(opened.get_slice("states")[layer].float())
            targets.append(opened.get_slice("targets")[layer].t())
    return torch.cat(states), torch.cat(targets)


@dataclass(frozen=True)
class TrainingConfig:
    """Training settings (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891).

    ``network`` is ``mlp``, two layers with GELU between them, or ``linear``, by ridge regression. A ``width`` of 0 stands for an eighth of the
    model's hidden size. AdamW's learning ``rate`` decreases to 0 along a cosine. ``ridge`` is added to the variance of standardized inputs.
    """

    network: str = "mlp"
    width: int = 0
    epochs: int = 15
    batch: int = 512
    rate: float = 2e-3
    ridge: float = 1e-3
    seed: int = 0


class Standardizer:
    """Mean and standard deviation, float32 [columns], of the columns of ``values``, [rows, columns]. Constant columns are not scaled."""

    def __init__(self, values: torch.Tensor) -> None:
        deviation = values.std(dim=0)
        self.mean, self.deviation = values.mean(dim=0), torch.where(deviation > 1e-6, deviation, 1.0)

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
    """Train one layer with its own random numbers: ``states`` are float32 [samples, hidden_size], ``targets`` float32 [samples, kv_heads].

    Return its weights on the CPU, with the names of :class:`~sglang_ext.mem_cache.scores.Predictor`.
    """
    inputs, outputs = Standardizer(states), Standardizer(targets)
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
    weights = []
    for before, after in zip(sizes, sizes[1:]):
        weights += [torch.randn(after, before, generator=generator) / before**0.5, torch.zeros(after)]
    weights = [tensor.to(inputs.device).requires_grad_() for tensor in weights]
    optimizer = torch.optim.AdamW(weights, lr=how.rate)
    steps = how.epochs * math.ceil(len(inputs) / how.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batches = (torch.randperm(len(inputs), generator=generator).split(how.batch) for _ in range(how.epochs))
    for rows in chain.from_iterable(batches):
        rows = rows.to(inputs.device)
        hidden = gelu(linear(inputs[rows], *weights[:2]))
        loss = mse_loss(linear(hidden, *weights[2:]), outputs[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return [tensor.detach() for tensor in weights]


def evaluate(predicted: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Mean squared error of predictions, and R^2 as the mean over KV heads. Both arguments are [samples, kv_heads]."""
    errors = (predicted - targets).square().mean(dim=0)
    variance = targets.var(dim=0, correction=0).clamp(min=1e-12)
    return float(errors.mean()), float((1 - errors / variance).mean())


@dataclass(frozen=True)
class TextSplit:
    """Files of samples that networks are fitted to, files of samples for evaluation, and the number of texts on the first side.

    All pieces of a text are on one side.
    """

    learned: list[Path]
    held: list[Path]
    texts: int


def split_texts(texts: list[list[TextPiece]], share: float) -> TextSplit:
    """Hold out a ``share`` of the texts, at least one, selected by hash. Raises ``CommandError`` if fewer than two are long enough."""
    named = sorted({tuple(sorted(piece.path for piece in pieces)) for pieces in texts if pieces})
    if len(named) < 2:
        raise CommandError(f"{len(named)} texts have {MIN_TOKENS} tokens or more; one is held out for evaluation: pass at least two")
    count = min(len(named) - 1, max(1, round(share * len(named))))
    held, learned = ({path for paths in some for path in paths} for some in (named[:count], named[count:]))
    return TextSplit(sorted(learned - held), sorted(held), len(named) - count)


def fit(sampler: Sampler, training: TrainingConfig, parts: TextSplit, layers: int, device: torch.device, progress: Callable[[], None]) -> Predictor:
    """Fit a predictor to the samples that ``sampler`` wrote, on ``device``, for a model with ``layers`` layers.

    Calls ``progress`` after each layer. Layers of an interrupted run are reused.
    """
    names = json.dumps([[path.name for path in side] for side in (parts.learned, parts.held)])
    config = {"sampling": asdict(sampler.sampling), "training": asdict(training), "samples": _short_hash(names)}
    settings = json.dumps(config, sort_keys=True)
    networks, loss, r2 = [], [], []
    for layer in range(layers):
        path = sampler.out / f"layer-{_short_hash(f'{sampler.model}/{settings}/{layer}')}.safetensors"
        try:
            tensors, metadata = read_checked(path)
        except CheckedFileError:
            states, targets = load_layer(parts.learned, layer)
            tensors = train(states.to(device), targets.to(device), training, layer)
            states, targets = load_layer(parts.held, layer)
            one = Predictor(**{name: tensor[None] for name, tensor in tensors.items()}, fitted=FitRecord("", "", 0, 0, (), ()))
            error, explained = evaluate(one(0, states), targets)
            write_checked(path, tensors, {"loss": repr(error), "r2": repr(explained)})
            tensors, metadata = read_checked(path)
        networks.append(tensors)
        loss.append(float(metadata["loss"]))
        r2.append(float(metadata["r2"]))
        progress()
    tokens = sum(len(read_checked(path)[0]["targets"][0, 0]) for path in parts.learned)
    fitted = FitRecord(sampler.model, settings, parts.texts, tokens, tuple(loss), tuple(r2))
    return Predictor(**{name: torch.stack([of[name] for of in networks]) for name in networks[0]}, fitted=fitted)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser("python -m sglang_ext.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("method", choices=("kvzap",))
    add = made.add_argument
    add("texts", nargs="+", type=Path, metavar="TEXTS", help="text files in UTF-8, similar to the served texts")
    add("--model", required=True, help="Hugging Face folder or name; the one that is served")
    add("--revision", help="of a model's name")
    add("--out", required=True, type=Path, metavar="FOLDER", help="folder for the predictor, with samples in FOLDER/work")
    add("--target", default=SamplingConfig.target, choices=("kvzip+", "kvzip"), help="which scores (default: %(default)s, as published)")
    add("--tokens", type=int, default=SamplingConfig.tokens, help="longer texts are split into pieces of this size (default: %(default)s)")
    add("--samples", type=int, default=SamplingConfig.samples, help="sampled tokens per piece (default: %(default)s)")
    add("--network", default=TrainingConfig.network, choices=("mlp", "linear"), help="default: %(default)s")
    add("--width", type=int, default=TrainingConfig.width, help="width of the mlp's inner layer; 0: an eighth of the hidden size (default)")
    add("--epochs", type=int, default=TrainingConfig.epochs, help="epochs of the mlp (default: %(default)s)")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="share of held-out texts (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda where there is one, else cpu")
    return made


def run(args: argparse.Namespace, console: Console) -> None:
    """Take the missing samples, and fit the missing layers. Raises ``CommandError`` or ``OptionError`` for an option or a text of no use."""
    for name, least in SMALLEST.items():
        if getattr(args, name) < least:
            raise CommandError(f"--{name} is {getattr(args, name)}; pass a whole number from {least}")
    if not 0 < args.held_out < 1:
        raise CommandError(f"--held-out is {args.held_out}; pass the share of the texts to hold out, for example 0.1")
    check_device(args.device)
    samples = args.out / "work"
    check_folder("--out", args.out)
    check_folder("--out", samples)
    folder = model_folder(args.model, args.revision, download=True)
    sampling = SamplingConfig(args.target, args.tokens, args.samples, args.seed)
    training = TrainingConfig(args.network, args.width, args.epochs, seed=args.seed)
    sampler = Sampler(AutoTokenizer.from_pretrained(folder), model_key(folder), sampling, samples)
    texts = [sampler.pieces(file) for file in args.texts]
    parts = split_texts(texts, args.held_out)
    layers = AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers
    with show_progress(console) as begin:
        if missing := [piece for pieces in texts for piece in pieces if not (piece.path.exists() and is_whole(piece.path))]:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).to(args.device).eval()
            # Each token is computed once, and repeated once.
            advance = begin("scores of texts", 2 * sum(len(piece.tokens) for piece in missing), "tokens")
            for piece in missing:
                sampler.take(model, piece, advance)
            del model
        advance = begin("networks", layers, "layers")
        predictor = fit(sampler, training, parts, layers, torch.device(args.device), lambda: advance(1))
    predictor.write(args.out)
    print_quality(predictor.fitted, console)


def print_quality(fitted: FitRecord, console: Console) -> None:
    """Print the errors of each layer, and a warning if some layers predict nothing."""
    title = f"on held-out texts; fitted to {fitted.tokens} tokens of {fitted.texts} texts"
    table = Table("layer", "mean squared error", "R^2", title=title)
    for layer, (loss, r2) in enumerate(zip(fitted.loss, fitted.r2)):
        table.add_row(str(layer), f"{loss:.3f}", f"{r2:.3f}")
    table.add_row("mean", *(f"{sum(values) / len(values):.3f}" for values in (fitted.loss, fitted.r2)))
    console.print(table)
    useless = [layer for layer, r2 in enumerate(fitted.r2) if not r2 > 0]
    if useless:
        layers = "no layer" if len(useless) == len(fitted.r2) else f"not layers {', '.join(map(str, useless))}"
        console.print(
            f"fit: warning: the network predicts {layers} of held-out texts better than a constant does (R^2 {min(fitted.r2):.3f} at "
            f"worst; above 0 it predicts something): pass more texts, or texts that are alike ({fitted.tokens} tokens of "
            f"{fitted.texts} texts were learned from), --network linear, or fewer --epochs",
            style="yellow", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, 2 for an error, or 130 if interrupted. A later run reuses the completed work."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    return exit_code("fit", lambda: run(args, console), console)


if __name__ == "__main__":
    sys.exit(main())
