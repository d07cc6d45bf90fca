"""The least time per decoded token that memory bandwidth allows: bytes that must be read over bytes per second."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.config.model_folder import kv_shape, read_config
from sglang_ext.managers.kv_offload import throughput_model
from sglang_ext.managers.kv_offload.throughput_model import Costs

if TYPE_CHECKING:
    from sglang_ext_bench.speed.settings import ServerSetting


def kv_token_bytes(config: Mapping[str, Any], bytes_per_number: int) -> int:
    """Bytes of keys and values of one token, over all layers."""
    kv_heads, dim = kv_shape(config)
    return 2 * config["num_hidden_layers"] * kv_heads * dim * bytes_per_number


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model that decoding reads.

    Attributes:
        weights: Bytes of the weights that each step reads, without the table of input embeddings.
        kv_token: Bytes of keys and values of one token, over all layers.
    """

    weights: int
    kv_token: int

    @classmethod
    def from_folder(cls, folder: Path, bytes_per_number: int) -> "ModelBytes":
        """Compute the bytes of a dense model from its ``config.json``: attention and gated MLP of each layer, and the output head."""
        config = read_config(folder)
        hidden, layers, query_heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads, dim = kv_shape(config)
        attention = hidden * dim * (2 * query_heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        weights = layers * (attention + mlp) + config["vocab_size"] * hidden
        return cls(weights * bytes_per_number, kv_token_bytes(config, bytes_per_number))

    def step(self, batch: int, tokens: float) -> float:
        """Bytes of a decode step of ``batch`` requests that each attend to ``tokens`` tokens."""
        return self.weights + batch * tokens * self.kv_token


def stock_ms(model: ModelBytes, bandwidth: float, batch: int, context: float) -> float:
    """Milliseconds per token of plain decoding, with ``bandwidth`` in bytes per second."""
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

    Args:
        model: Bytes of the model.
        bandwidth: Read bandwidth in bytes per second.
        batch: Requests at once.
        context: Tokens of each request.
        budget: Share of the KV that a draft step reads.
        drafts: Draft steps of a round, before one verification on the full KV.
        accept_length: Mean tokens of a verification.
    """
    read = drafts * model.step(batch, budget * context) + model.step(batch, context)
    return 1000 * read / bandwidth / accept_length


@dataclass(frozen=True)
class Machine:
    """Bandwidths and memory of a server.

    Attributes:
        bandwidth: Read bandwidth of device memory, bytes per second.
        pool: Tokens that fit into the KV pool.
        link: Bandwidth of loads from host memory, bytes per second.
    """

    bandwidth: float
    pool: int
    link: float


def tiered_tokens_per_second(
    model: ModelBytes, machine: Machine, batch: int, prompt: int, output: int, setting: "ServerSetting", acceptance: float
) -> float:
    """Tokens per second of up to ``batch`` requests if the full KV is in tiers (throughput_model.py, VeriCache's (3), (5)-(11)).

    Each request is in the middle of its output. The output tokens are on the device, and in the compressed KV of each request.

    Args:
        model: Bytes of the model.
        machine: Bandwidths and memory of the server.
        batch: Requests at once.
        prompt: Prompt tokens of each request.
        output: Output tokens of each request.
        setting: Budget, draft length and tier of the server.
        acceptance: Probability that a draft token is accepted if the tokens before it were.
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
    max_drafts = max(setting.draft_length, setting.tier.max_drafts // setting.draft_length * setting.draft_length)
    return throughput_model.best_plan(costs, acceptance, batch, setting.tier.name, max_drafts).tokens_per_second


def measure_bandwidth() -> float | None:
    """Measure the read bandwidth of the first GPU in bytes per second. Returns None without a GPU.

    It is the best of ten sums over 4 GiB, which read each byte once.
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
    """GiB in use of the first GPU's memory, by all processes. None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
