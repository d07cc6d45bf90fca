"""Floating-point operations of a decoded token (AsyncSpade, equations 6 to 11), and times of the parts of a step (Figure 2)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from sglang_ext.config.model_folder import kv_shape
from sglang_ext.mem_cache.selection.scoring import grouped
from sglang_ext_bench.attention import timing
from sglang_ext_bench.longcot.arms import LongcotLoad

PAGE = 16
"""Tokens of a page."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense model that the equations use.

    Attributes:
        layers: Number of layers (l).
        hidden: Size of hidden states (H).
        heads: Query heads (q).
        kv_heads: KV heads (kv).
        dim: Size of a head (h).
        inner: Inner size of the gated feed-forward network (i).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read the sizes from a ``config.json``."""
        kv_heads, dim = kv_shape(config)
        sizes = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
        return cls(*sizes, kv_heads, dim, config["intermediate_size"])

    @property
    def linear_flops(self) -> int:
        """Operations of all linear layers of the decoder (equation 6)."""
        projections = 4 * self.hidden * self.heads * self.dim + 4 * self.kv_heads * self.dim * self.hidden
        return self.layers * (projections + 6 * self.hidden * self.inner)

    def attention_flops(self, tokens: int) -> int:
        """Operations of attention over ``tokens`` tokens in all layers (equations 7 and 10)."""
        return self.layers * 4 * self.heads * self.dim * tokens

    def scoring_flops(self, scored: float) -> int:
        """Operations to score ``scored`` keys or pages with the queries (the second part of equations 8 and 9)."""
        return int(self.layers * 2 * self.heads * self.dim * scored)


def token_flops(shape: ModelShape, method: str, tokens: int, selected: int, page: int = PAGE) -> int:
    """Operations of one token on the critical path of a step (equation 11).

    Args:
        shape: Sizes of the model.
        method: ``full``; ``tova`` and ``true-query``, which score every token on that path; ``quest``, which scores pages; ``spade``, where
            a cache rank scores; ``spade-between-steps``, where the server scores every token.
        tokens: Tokens of the context (T).
        selected: Tokens that attention reads (C).
        page: Tokens of a page (P).

    Raises:
        KeyError: The method has no equation.
    """
    scored = {"full": 0, "tova": tokens, "true-query": tokens, "quest": tokens / page, "spade": 0, "spade-between-steps": tokens}[method]
    attended = tokens if method == "full" else selected
    return shape.linear_flops + shape.attention_flops(attended) + shape.scoring_flops(scored)


@dataclass(frozen=True)
class StepPartTime:
    """The time of one part of a layer's step. The fields are keys of the JSON file.

    Attributes:
        load: Batch, context and selected tokens, in words.
        part: Name of the part.
        seconds: Its time.
    """

    load: str
    part: str
    seconds: float


def time_step_parts(shape: ModelShape, load: LongcotLoad, device: torch.device) -> Iterator[StepPartTime]:
    """Time each part of a layer's step that selects pages by Quest's bounds, without a server.

    KV and weights are random: float32 on a CPU, bfloat16 on a GPU. A server updates the bounds when keys arrive, so making them is not timed.
    """
    for part, run in _step_parts(shape, load, device).items():
        yield StepPartTime(str(load), part, timing.seconds(run, device))


def _step_parts(shape: ModelShape, load: LongcotLoad, device: torch.device) -> dict[str, Callable[[], object]]:
    """Functions that compute the parts of a layer's step, by name."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    count = load.select // PAGE
    keys, values = (noise(load.batch, shape.kv_heads, load.context // PAGE, PAGE * shape.dim) for _ in "kv")
    paged = keys.unflatten(-1, (PAGE, shape.dim))
    low, high = paged.amin(-2).transpose(-1, -2).contiguous(), paged.amax(-2).transpose(-1, -2).contiguous()
    query = grouped(noise(load.batch, shape.heads, shape.dim), paged.flatten(-3, -2)).to(dtype)
    hidden, inner, width = noise(load.batch, shape.hidden), shape.inner, (shape.heads + 2 * shape.kv_heads) * shape.dim
    qkv, out = noise(shape.hidden, width), noise(shape.heads * shape.dim, shape.hidden)
    gate_up, down = noise(shape.hidden, 2 * inner), noise(inner, shape.hidden)

    def score() -> torch.Tensor:
        return (query.clamp(min=0) @ high + query.clamp(max=0) @ low).mean(dim=-2)

    scores = score()
    selected = scores.topk(count, dim=-1).indices

    def gather() -> list[torch.Tensor]:
        index = selected[..., None].expand(-1, -1, -1, keys.shape[-1])
        return [each.gather(2, index).unflatten(-1, (PAGE, shape.dim)).flatten(2, 3) for each in (keys, values)]

    k, v = gather()

    def linear() -> torch.Tensor:
        projected = (hidden @ qkv)[:, : shape.heads * shape.dim] @ out
        gate, up = (projected @ gate_up).chunk(2, dim=-1)
        return (silu(gate) * up) @ down

    def attend() -> torch.Tensor:
        return (query @ k.transpose(-1, -2) * shape.dim**-0.5).softmax(dim=-1) @ v

    return {
        "scoring pages": score,
        "selecting pages": lambda: scores.topk(count, dim=-1),
        "gathering KV": gather,
        "attention": attend,
        "linear layers": linear,
    }
