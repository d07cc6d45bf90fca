"""FlashAttention-3's attention of captured verifications: SGLang's ``fa3`` backend with another width.

It plans on the device, so a round does not need the lengths on the host.
"""

from typing import TYPE_CHECKING

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class VerifyFlashAttention(FlashAttentionBackend):
    """SGLang's ``fa3`` backend, for the graphs of verify_graphs.py."""

    def __init__(self, model_runner: "ModelRunner", width: int):
        super().__init__(model_runner, fa_impl_ver=3)
        # SGLang has a single number of draft tokens; the graphs here have several widths.
        self.speculative_num_draft_tokens = width
        # A verification may exceed the end of a context; the token table is wide enough.
        self.max_context_len += width
