"""How SGLang's KV pool leaves room for what lies beside it.

SGLang gives its pool what is free once weights are loaded, those of a drafter among them. The worker is built in the place of
a drafter: it holds as many bytes as the plan says while the pool is sized, and gives them back before it takes what they
stand for.
"""

import logging
from typing import TYPE_CHECKING

import torch

from sglang_ext.managers.memory_plan import MemoryPlan, MemoryPlanner, ModelSizes, gb
from sglang_ext.options import OptionError

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# What a device rounds two allocations up by, at most.
GRAIN = 4 << 20


class HeldMemory:
    """Memory of the device that the pool shall not get; made when the weights are loaded, before the pool is.

    With ``--max-total-tokens`` the pool stays as large as that, where that fits without the plan.

    Args:
        planner: plans for the server's flags.
        model_runner: the target's.

    Raises:
        OptionError: the weights leave less than the plan.
    """

    def __init__(self, planner: MemoryPlanner, model_runner: "ModelRunner") -> None:
        self._planner = planner
        model_runner.init_kv_cache_configurator()
        configurator = model_runner.kv_cache_configurator
        available = configurator._profile_available_bytes(model_runner.pre_model_load_memory)
        asked, slot = planner.args.max_total_tokens, planner.model.slot_bytes
        tokens = min(available // slot, asked or available)
        requests = configurator.resolve_max_num_reqs(tokens)
        # For a pool as large as it would be alone: what depends on that is a little less in the end.
        plan = planner.plan(requests, tokens, planner.rings(requests, tokens))
        if plan.total >= available:
            raise OptionError(
                f"sglang-ext needs {plan}; the weights leave {gb(available)}: lower --max-running-requests (now {requests}) "
                f"or --cuda-graph-max-bs, or raise --mem-fraction-static (now {planner.args.mem_fraction_static})"
            )
        self._rings = plan.rings
        # Host memory counts as taken once it is written.
        size = self._beside(plan.total, available, (asked or 0) * slot)
        self._held: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=model_runner.device).zero_()

    def _beside(self, planned: int, available: int, pool: int) -> int:
        """Bytes to hold of those that are planned, beside a pool of so many that is asked for, 0 for none."""
        spare = available - pool
        if not pool or spare < 0:
            return planned  # SGLang says itself that such a pool does not fit
        if spare >= planned:
            return 0
        args = self._planner.args
        logger.warning(
            "sglang-ext: a pool of --max-total-tokens %s leaves %s of the %s that lie beside it; the rest comes out of what "
            "--mem-fraction-static %s leaves for all else: lower one of both where memory runs out",
            args.max_total_tokens, gb(spare), gb(planned), args.mem_fraction_static,
        )  # fmt: skip
        return max(0, spare - GRAIN)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._held is None else self._held.nbytes

    @property
    def model(self) -> ModelSizes:
        """Sizes of the model, on this rank."""
        return self._planner.model

    @property
    def ahead(self) -> int:
        """Tokens by which rows of the token table are widened."""
        return self._planner.ahead

    def release(self, requests: int, tokens: int) -> MemoryPlan:
        """Give back what was held, as the pool is there, for so many requests and tokens; what is taken for them, told in
        the log."""
        on_gpu = self._held is not None and self._held.is_cuda
        self._held = None
        if on_gpu:
            # Graphs, which have memory of their own, find it too.
            torch.cuda.empty_cache()
        plan = self._planner.plan(requests, tokens, min(requests, self._rings))
        logger.info("sglang-ext: %s", plan)
        return plan
