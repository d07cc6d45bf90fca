"""The least time that memory bandwidth allows a decoded token: the bytes it must read over the bandwidth."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.config.model_folder import kv_shape, read_config
from sglang_ext.managers.kv_offload import throughput_model
from sglang_ext.managers.kv_offload.costs import Costs

if TYPE_CHECKING:
    from sglang_ext_bench.speed.settings import Setting


def kv_token_bytes(config: Mapping[str, Any], bytes_per_number: int) -> int:
    """Bytes of keys and values of one token, over all layers."""
    kv_heads, dim = kv_shape(config)
    return 2 * config["num_hidden_layers"] * kv_heads * dim * bytes_per_number


@dataclass(frozen=True)
class ModelBytes:
    """What decoding reads.

    Attributes:
        weights: bytes of the weights that each step reads, without the table of input embeddings.
        kv_token: bytes of keys and values of one token, over all layers.
    """

    weights: int
    kv_token: int

    @classmethod
    def of(cls, folder: Path, bytes_per_number: int) -> "ModelBytes":
        """From a dense model's ``config.json``: attention and gated MLP in each layer, and the output head."""
        config = read_config(folder)
        hidden, layers, query_heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads, dim = kv_shape(config)
        attention = hidden * dim * (2 * query_heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        weights = layers * (attention + mlp) + config["vocab_size"] * hidden
        return cls(weights * bytes_per_number, kv_token_bytes(config, bytes_per_number))

    def step(self, batch: int, tokens: float) -> float:
        """Bytes of a step in which each of ``batch`` requests attends to ``tokens`` tokens."""
        return self.weights + batch * tokens * self.kv_token


def stock_ms(model: ModelBytes, bandwidth: float, batch: int, context: float) -> float:
    """Milliseconds per token of plain decoding; ``bandwidth`` in bytes per second."""
    return 1000 * model.step(batch, context) / bandwidth


def verified_ms(
    model: ModelBytes,
    bandwidth: float,
    batch: int,
    context: float,
    budget: float,
    drafts: int,
    accept_length: float,
) -> float:
    """Milliseconds per token of verified decoding (VeriCache, equation (11) with full KV on the device).

    A round drafts ``drafts`` tokens on ``budget`` of the context, verifies once on all of it, and gains
    ``accept_length`` tokens.
    """
    read = drafts * model.step(batch, budget * context) + model.step(batch, context)
    return 1000 * read / bandwidth / accept_length


@dataclass(frozen=True)
class Machine:
    """What a server and its GPU have.

    Attributes:
        bandwidth: of reads, bytes per second.
        pool: tokens that the KV pool holds.
        link: bytes per second from the host.
    """

    bandwidth: float
    pool: int
    link: float


def tiered_tokens_per_second(
    model: ModelBytes, machine: Machine, batch: int, prompt: int, output: int, setting: "Setting", acceptance: float
) -> float:
    """Tokens per second of up to ``batch`` requests where full KV lies in tiers (throughput_model.py, VeriCache's (3), (5)-(11)).

    Requests are in the middle of their ``output``, which is on the device and in each copy.

    Args:
        acceptance: probability that a draft is accepted when those before it were.
    """
    costs = Costs(
        weights=model.weights,
        context=model.kv_token * (prompt + output / 2),
        bandwidth=machine.bandwidth,
        link=machine.link,
        memory=model.kv_token * machine.pool,
        budget=setting.budget,
        drafts=setting.draft_length,
        recent=model.kv_token * output / 2,
    )
    longest = max(setting.draft_length, setting.tier.longest // setting.draft_length * setting.draft_length)
    return throughput_model.best_plan(costs, acceptance, batch, setting.tier.name, longest).tokens_per_second


def measure_bandwidth() -> float | None:
    """Read bandwidth of the first GPU, in bytes per second; None without one.

    The best of ten sums over 4 GiB, which read them once and write nothing.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    numbers = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        begin.record()
        numbers.sum()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    size = numbers.numel() * numbers.element_size()
    del numbers
    torch.cuda.empty_cache()
    return size / best * 1000


def memory_in_use() -> float | None:
    """GiB of the first GPU's memory that are in use, whoever uses them; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
