"""The out-of-tree SGLang platform that runs the stock server on a plain CPU.

SGLang calls :func:`activate` through the ``sglang.srt.platforms`` entry point. If an accelerator is present it returns ``None``, so that
SGLang keeps its own platform.
"""

import os

PLATFORM_CLASS = "sglang_ext.platforms.plain_cpu:PlainCpuPlatform"


def activate() -> str | None:
    """Return the name of the plain CPU platform if no accelerator is present. Otherwise return ``None``.

    With SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE=1``) it also returns ``None``.
    """
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return PLATFORM_CLASS
