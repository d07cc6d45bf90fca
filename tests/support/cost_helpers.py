"""Machines and loads, in small numbers, for tests of what rounds cost."""

from hypothesis import strategies as st

from sglang_ext.managers.kv_offload import throughput_model
from sglang_ext.managers.kv_offload.throughput_model import Costs, plain_decoding_plan

NUMBERS = {
    "weights": st.floats(0, 20),
    "context": st.floats(1, 10),
    "bandwidth": st.floats(50, 500),
    "link": st.floats(1, 60),
    "memory": st.floats(5, 60),
    "budget": st.sampled_from([0.0625, 0.25, 0.5]),
    "drafts": st.sampled_from([1, 4, 16]),
    "turnaround": st.floats(0, 0.1),
    "token_seconds": st.floats(0, 0.001),
}


def machines(**others: st.SearchStrategy) -> st.SearchStrategy[Costs]:
    """Costs of any machine; ``others``: numbers of another range."""
    return st.builds(Costs, **NUMBERS | others)


def throughput(costs: Costs, p: float, resident: int, offloaded: int, drafts_resident: int, drafts_offloaded: int) -> float:
    """Tokens per second of one placement, by drafts between verifications; plain decoding where nothing drafts."""
    if not offloaded and not drafts_resident:
        return plain_decoding_plan(costs, resident).tokens_per_second if resident * costs.context <= costs.memory else 0.0
    assert all(not drafts % costs.drafts for drafts in (drafts_resident, drafts_offloaded))
    rounds = (max(1, drafts // costs.drafts) for drafts in (drafts_resident, drafts_offloaded))
    return float(throughput_model.throughput(costs, p, resident, offloaded, *rounds))
