"""Machines and loads, in small numbers, for tests of what rounds cost."""

from hypothesis import strategies as st

from sglang_ext.managers.kv_offload.throughput_model import Costs

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
