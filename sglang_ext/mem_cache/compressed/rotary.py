"""The rotary embedding of a model: applying it, taking it back, and its mean over future positions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.core import OptionError

# Rows of a table of cosines and sines from which frequencies are read. Each row refines the estimate of the row before. The coarser
# estimate gives the number of whole turns, even if the table is in bfloat16.
STRIDES = (1, 32, 1024, 32768)
# Largest difference between a model's table and a table from the frequencies: at large positions angles are rounded.
TABLE_ERROR = 0.05
# Steps per turn in which angles are counted. Integers that overflow lose whole turns only, so that large positions stay exact.
TURN = 1 << 32
# Number of position offsets whose rotation is cached.
MAX_CACHED_ROTATIONS = 256


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864) with frequencies that do not depend on the position.

    Attributes:
        frequencies: float32 [pairs], radians per token. The first ``2 * pairs`` entries of a vector are rotated.
        interleaved: Whether entries ``2 i`` and ``2 i + 1`` form pair ``i``; otherwise ``i`` and ``i + pairs`` do (NeoX).
    """

    frequencies: torch.Tensor
    interleaved: bool = False

    @cached_property
    def steps(self) -> torch.Tensor:
        """The frequencies in steps of a turn: int64 [pairs], 0 to ``TURN - 1``."""
        return (self.frequencies.double() * (TURN / math.tau)).round().long() % TURN

    def unrotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Undo the rotation of ``vectors``, float [tokens, ..., dim], at ``positions``, int64 [tokens]."""
        angles = self._angles(positions).view(len(positions), *(1,) * (vectors.dim() - 2), -1)
        return self._rotate_pairs(vectors, angles.cos(), -angles.sin())

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply rotary embedding at ``positions``, int64 [..., tokens], to ``vectors``, float [..., tokens, dim]. Negative positions undo it."""
        angles = self._angles(positions)
        return self._rotate_pairs(vectors, angles.cos(), angles.sin())

    def rotate_ahead(self, vectors: torch.Tensor, count: int) -> torch.Tensor:
        """Rotate already rotated vectors by ``count`` more positions: float32 [..., dim]."""
        cos, sin, other = self._rotation(count, vectors.shape[-1])
        if vectors.is_cuda and vectors.dim() == 4 and vectors.stride()[2:] == (vectors.shape[-1], 1):
            from sglang_ext.layers.kernels.key_scores import rotate_queries

            return rotate_queries(vectors, (cos, sin, other))
        vectors = vectors.float()
        return torch.addcmul(vectors * cos, vectors[..., other], sin)

    def mean_rotation(self, begin: int, count: int, dim: int) -> torch.Tensor:
        """Mean of the rotations at positions ``[begin, begin + count)``: float32 [dim, dim], for column vectors."""
        angles = torch.arange(begin, begin + count, device=self.frequencies.device)[:, None] * self.frequencies
        units = torch.eye(dim, device=self.frequencies.device)
        return self._rotate_pairs(units, angles.cos().mean(dim=0), angles.sin().mean(dim=0)).t()

    def _rotation(self, count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Signed cosine and sine of each of ``dim`` entries for ``count`` positions, and the other entry of its pair: [dim] each.

        The result is cached, and is on the device before this returns, so that one stream may use the result of another.
        """
        if (found := self._rotations.get((count, dim))) is None:
            pairs = len(self.frequencies)
            first = torch.arange(pairs) * (2 if self.interleaved else 1)
            second = first + (1 if self.interleaved else pairs)
            angles = self._angles(torch.tensor(count, device=self.steps.device)).cpu()
            cos, sin, other = torch.ones(dim), torch.zeros(dim), torch.arange(dim)
            cos[first] = cos[second] = angles.cos()
            sin[first], sin[second] = -angles.sin(), angles.sin()
            other[first], other[second] = second, first
            if len(self._rotations) == MAX_CACHED_ROTATIONS:
                self._rotations.clear()
            found = self._rotations[count, dim] = tuple(each.to(self.frequencies.device) for each in (cos, sin, other))
        return found

    def cached_rotations(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The tensors that :meth:`rotate_ahead` reads. A caller that launches it again, as a CUDA graph does, must keep them alive."""
        return tuple(self._rotations.values())

    @cached_property
    def _rotations(self) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return {}

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Angles of the pairs at ``positions``, int64 of any sign, within a turn: float32 [..., pairs]."""
        return (positions[..., None] * self.steps & (TURN - 1)).float() * (math.tau / TURN)

    def _rotate_pairs(self, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Multiply each pair by the complex number ``cos + i sin``, both [..., pairs]."""
        pairs = len(self.frequencies)
        rotating, rest = vectors[..., : 2 * pairs], vectors[..., 2 * pairs :]
        by_pair = rotating.unflatten(-1, (pairs, 2)) if self.interleaved else rotating.unflatten(-1, (2, pairs)).transpose(-1, -2)
        first, second = by_pair.unbind(-1)
        result = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        result = result if self.interleaved else result.transpose(-1, -2)
        return torch.cat([result.flatten(-2), rest], dim=-1)


def find_rotary(model: torch.nn.Module, is_attention: Callable[[torch.nn.Module], bool], compressor: str) -> Rotary:
    """The rotary embedding that all attention layers of an SGLang model share.

    It is derived from the table of cosines and sines, and therefore includes any scaling of the frequencies. The module that holds an
    attention layer also holds its ``rotary_emb``. Messages name the ``compressor`` that needs it, as in ``--kv-compressor``.

    Raises:
        OptionError: A layer has none, layers differ, or its frequencies depend on the position.
    """
    owners = [module for module in model.modules() if any(map(is_attention, module.children()))]
    embeddings = {id(found): found for found in (getattr(owner, "rotary_emb", None) for owner in owners)}
    if len(embeddings) != 1:
        raise _refused(compressor, f"its layers have {len(embeddings)} different ones")
    (embedding,) = embeddings.values()
    if embedding is None:
        raise _refused(compressor, "there is none beside its attention layers")
    table = getattr(embedding, "cos_sin_cache", None)
    style = getattr(embedding, "is_neox_style", None)
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or len(table) < 2 or style is None:
        raise _refused(compressor, f"{type(embedding).__name__} is of an unknown kind")
    rotary = Rotary(_frequencies(table), not style)
    if not _matches_table(rotary, table):
        raise _refused(compressor, f"frequencies of {type(embedding).__name__} depend on the position")
    return rotary


def _frequencies(table: torch.Tensor) -> torch.Tensor:
    """Frequencies of a table [positions, 2 pairs] of cosines and sines, possibly scaled by one factor: float32 [pairs]."""
    cos, sin = table.double().chunk(2, dim=-1)
    found = torch.zeros_like(cos[0])
    for stride in (stride for stride in STRIDES if stride < len(table)):
        angle = torch.atan2(sin[stride], cos[stride])
        turns = ((found * stride - angle) / math.tau).round()
        found = (angle + turns * math.tau) / stride
    return found.float()


def _matches_table(rotary: Rotary, table: torch.Tensor) -> bool:
    """Whether distant rows of a table follow from the frequencies, up to one factor."""
    # On the host: SGLang's deterministic mode replaces operators on a GPU, and they do not support float64.
    rows = torch.tensor([1, len(table) // 3, len(table) // 2, len(table) - 1])
    angles = rows[:, None].double() * rotary.frequencies.cpu().double()
    found = table[rows.to(table.device)].cpu().double()
    scale = found[0].square().mean().mul(2).sqrt()
    return bool((torch.cat([angles.cos(), angles.sin()], dim=-1) * scale - found).abs().max() <= TABLE_ERROR * scale)


def _refused(compressor: str, reason: str) -> OptionError:
    return OptionError(
        f"--kv-compressor {compressor} cannot take back the model's rotary embedding: {reason}. It serves models with one "
        "rotary embedding in all layers, of fixed frequencies; use --kv-compressor snapkv for this model."
    )
