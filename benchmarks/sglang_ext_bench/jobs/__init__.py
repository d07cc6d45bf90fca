"""``sglang-ext-bench jobs``: completion times of jobs on prefill and decode servers."""
