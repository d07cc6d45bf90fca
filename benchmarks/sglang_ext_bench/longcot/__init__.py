"""``sglang-ext-bench longcot``: long outputs with sparse attention."""
