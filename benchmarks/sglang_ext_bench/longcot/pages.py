"""Where a step with choices by pages spends its time (AsyncSpade, Figure 2): one layer of a model's shapes, without a server."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from sglang_ext.mem_cache.selection.scoring import grouped
from sglang_ext_bench.attention import timing
from sglang_ext_bench.longcot.arms import Load
from sglang_ext_bench.longcot.flops import ModelShape

PAGE = 16


@dataclass(frozen=True)
class PagePart:
    """Of one layer.

    Attributes:
        load: batch, context and tokens that are selected.
        part: its name.
        seconds: that it takes.
    """

    load: str
    part: str
    seconds: float


def parts(shape: ModelShape, load: Load, device: torch.device) -> Iterator[PagePart]:
    """Each part of a layer's step, measured alone: bounds times query, the best pages, their KV gathered, attention over it, linear layers.

    KV and weights are random: float32 on a CPU, bfloat16 on a GPU. Bounds are kept as keys come, so that making them does not count.
    """
    for part, run in _runs(shape, load, device).items():
        yield PagePart(str(load), part, timing.seconds(run, device))


def _runs(shape: ModelShape, load: Load, device: torch.device) -> dict[str, Callable[[], object]]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    drawn = torch.Generator(device).manual_seed(0)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=drawn, device=device, dtype=dtype)

    count = load.select // PAGE
    of_heads = load.batch, shape.kv_heads
    keys, values = (noise(*of_heads, load.context // PAGE, PAGE * shape.dim) for _ in "kv")
    paged = keys.unflatten(-1, (PAGE, shape.dim))
    low, high = paged.amin(-2).transpose(-1, -2).contiguous(), paged.amax(-2).transpose(-1, -2).contiguous()
    query = grouped(noise(load.batch, shape.heads, shape.dim), paged.flatten(-3, -2)).to(dtype)
    hidden, inner, width = noise(load.batch, shape.hidden), shape.inner, (shape.heads + 2 * shape.kv_heads) * shape.dim
    qkv, out = noise(shape.hidden, width), noise(shape.heads * shape.dim, shape.hidden)
    both, down = noise(shape.hidden, 2 * inner), noise(inner, shape.hidden)

    def scores() -> torch.Tensor:
        return (query.clamp(min=0) @ high + query.clamp(max=0) @ low).mean(dim=-2)

    bound = scores()
    best = bound.topk(count, dim=-1).indices

    def gather() -> list[torch.Tensor]:
        index = best[..., None].expand(-1, -1, -1, keys.shape[-1])
        return [each.gather(2, index).unflatten(-1, (PAGE, shape.dim)).flatten(2, 3) for each in (keys, values)]

    k, v = gather()

    def linear() -> torch.Tensor:
        mixed = (hidden @ qkv)[:, : shape.heads * shape.dim] @ out
        gate, up = (mixed @ both).chunk(2, dim=-1)
        return (silu(gate) * up) @ down

    def attend() -> torch.Tensor:
        return (query @ k.transpose(-1, -2) * shape.dim**-0.5).softmax(dim=-1) @ v

    return {
        "scoring pages": scores,
        "choosing pages": lambda: bound.topk(count, dim=-1),
        "gathering KV": gather,
        "attention": attend,
        "linear layers": linear,
    }
