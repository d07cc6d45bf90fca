"""SGLang's kernel that writes the slots of coming tokens to the token table, compiled before a request would wait for that."""

import torch
from sglang.srt.mem_cache import allocation


def compile_ahead(token_table: torch.Tensor, requests: int) -> None:
    """Run it once in each of its forms, with nothing to write.

    Triton compiles it anew for each power of 2 of requests, and for slots that begin at a multiple of 16 bytes or elsewhere, which
    what the allocator hands out does now and then: some 40 ms each, in the middle of a batch's first rounds.

    Args:
        token_table: int32 [rows, width], SGLang's.
        requests: that run at once at most.
    """
    slots = torch.zeros(4, dtype=torch.int64, device=token_table.device)
    for exponent in range((requests - 1).bit_length() + 1):
        rows = torch.zeros(1 << exponent, dtype=torch.int64, device=token_table.device)
        nothing = rows.int()
        for begin in (0, 1):
            allocation.assign_req_to_token_pool_func(rows, token_table, nothing, nothing, slots[begin:], len(rows))
