"""The out-of-tree SGLang platform that runs the stock server on a plain CPU.

SGLang calls :func:`activate` through the ``sglang.srt.platforms`` entry point. Wherever an
accelerator is present it answers ``None``, so that SGLang keeps its own platform.
"""

import os

PLATFORM_CLASS = "sglang_ext.platforms.plain_cpu:PlainCpuPlatform"


def activate() -> str | None:
    """Name the plain CPU platform where no accelerator is present, else ``None``.

    SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE=1``) stays available: when it is asked for,
    this platform stays out of the way.
    """
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return PLATFORM_CLASS
