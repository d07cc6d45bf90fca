"""Where copies are served that hold no plain tokens: packed ones, and those of uneven heads."""

from typing import TYPE_CHECKING

from sglang_ext.config.options import attention_backends, offloads
from sglang_ext.core import OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

# By device, the attention backends with which such copies are served. On a CPU the backend reads them; on a GPU steps over
# them have a backend of their own, and these do the rest.
BACKENDS: dict[str, tuple[str, ...]] = {"cpu": ("torch_native",), "cuda": ("flashinfer", "triton", "fa3")}


def check_resolved(args: "KVServerArgs", copies: str, remedy: str) -> None:
    """Refuse devices, backends and schedules where such copies are not read, once SGLang has chosen them.

    Args:
        args: the server's.
        copies: names the copies, for messages.
        remedy: what to pass instead.

    Raises:
        OptionError: names what it chose, and the remedy.
    """
    found = attention_backends(args)
    if found - set(BACKENDS.get(args.device, ())):
        raise OptionError(
            f"--device is {args.device} and --attention-backend {', '.join(sorted(found))}; {copies} are read on {_readers()}. "
            f"Pass one of these, or {remedy}."
        )
    if args.device != "cpu" and args.enable_deterministic_inference and offloads(args):
        raise OptionError(
            f"--kv-full-tier is {args.kv_full_tier!r} with --enable-deterministic-inference; of {copies} a GPU reads one token a "
            "request at a time: requests without a copy answer there in the steps in which others draft, and round differently. "
            f"Pass --kv-full-tier device, or {remedy}."
        )


def _readers() -> str:
    return ", on ".join(f"{device} with {', '.join(allowed)}" for device, allowed in BACKENDS.items())
