"""What a request is told whose room failed.

SGLang ends it with status 500 and a text that begins with ranks and numbers, which its log keeps. A client learns from this module's
words what failed, at which server, and whether to send the request again.
"""

import re
from http import HTTPStatus

# Reasons are text where they come from: SGLang's, and those of other servers. These say that the other server is gone, or too slow.
GONE = re.compile(
    r"is silent for|not reached for|cannot be reached|no prefill server answers|no prefill rank is known|"
    r"Lost connection with|but now it is down|Could not fetch bootstrap info|timed out after .* in KVPoll|PD retract rebootstrap"
)
FAILED = {
    "prefill": "the prefill server could not send the prompt's KV to the decode server",
    "decode": "the decode server could not get the prompt's KV from the prefill server",
}
AGAIN = "send the request again"


def told(message: str, room: int | None, status: int | None) -> tuple[str, int | None]:
    """A message and a status for a request that SGLang ends with ``message``; both as they are where that is not of a room's failure.

    Args:
        message: as SGLang's loops make it of a ``KVTransferError``.
        room: of the request.
        status: that SGLang would answer with.
    """
    before, mark, reason = message.partition(f"KVTransferError(bootstrap_room={room}): ")
    if not mark:
        return message, status
    failed = FAILED["prefill" if before.startswith("Prefill") else "decode"]
    if GONE.search(reason) is None:
        return f"{failed}: {reason}", status
    return f"{failed}: {reason.rstrip('.')}; {AGAIN}", HTTPStatus.SERVICE_UNAVAILABLE
