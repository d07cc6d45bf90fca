"""The out-of-tree SGLang platform that runs the stock server on a plain CPU.

SGLang calls :func:`activate` through the ``sglang.srt.platforms`` entry point. If an accelerator is present it returns ``None``, so that
SGLang keeps its own platform.
"""

import os


def activate() -> str | None:
    """The name of the plain CPU platform. None with an accelerator or SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE=1``)."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "sglang_ext.platforms.plain_cpu:PlainCpuPlatform"
