"""Checks whether a transfer backend (``--disaggregation-transfer-backend``) works on this machine.

SGLang's parser only knows the names. The scheduler imports a transport's modules after the weights are loaded.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from sglang_ext.config.options import BACKEND


@dataclass(frozen=True)
class Transport:
    """The module that SGLang imports for a transport.

    Attributes:
        module: The module that transfers the bytes.
        remedy: How to install it.
    """

    module: str
    remedy: str


MOONCAKE_TCP = "mooncake_tcp"
# SGLang's transports. Other ones include what they need, as ours does.
TRANSPORTS = {
    "mooncake": Transport("mooncake.engine", "pip install mooncake-transfer-engine"),
    MOONCAKE_TCP: Transport("mooncake.engine", "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine)"),
    "nixl": Transport("nixl._api", "pip install nixl"),
    "mori": Transport("mori.io", "use SGLang's image for AMD's GPUs, which has it"),
    "ascend": Transport("memfabric_hybrid", "use SGLang's image for Ascend's NPUs, which has it"),
}
# It transfers nothing.
FAKE = "fake"


def transport_obstacle(backend: str) -> str | None:
    """Why a prefill and a decode server cannot transfer KV with this backend here, with the remedy, in one line. None if they can.

    The transport's module is imported, because it may need system libraries.
    """
    if backend == FAKE:
        return f"it moves no KV, and SGLang's prefill servers refuse it: use {BACKEND}"
    transport = TRANSPORTS.get(backend)
    if transport is None:
        return None
    package = transport.module.partition(".")[0]
    if find_spec(package) is None:
        return f"the package {package} is not installed: {transport.remedy}, or use {BACKEND}"
    try:
        import_module(transport.module)
    except (ImportError, OSError) as error:
        said = " ".join(str(error).split())
        return f"{transport.module} does not load ({type(error).__name__}: {said}): install what it lacks, or use {BACKEND}"
    return None
