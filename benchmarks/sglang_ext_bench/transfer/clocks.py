"""Times of the tokens of a request, from the end of its prefill. The token that prefill computes is not counted.

There are three clocks:

generated   The decode server has computed k tokens. Draft tokens count, rejected ones included.
kept        The decode server has computed the k-th output token. An accepted draft token counts from its draft step, a bonus token from its
            verification. Lynx reports this clock (section 6.1 of the paper).
visible     The client has received the token. Draft tokens are sent after they are verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext_bench.timelines import TransferEvent
from sglang_ext_bench.transfer.server_pair import TransferResponse

CLOCKS = ("generated", "kept", "visible")


@dataclass(frozen=True)
class RequestTimes:
    """Measurements of one request. The fields are keys of the JSON file. Times are seconds from the end of its prefill.

    Attributes:
        tokens: Tokens of the prompt.
        cold: The prompt was not in the prefill server's prefix cache.
        generated: Time of each token after the first by the clock ``generated``.
        kept: The same by the clock ``kept``.
        visible: The same by the clock ``visible``.
        sending: Time at which its first KV was submitted for encoding. Negative if before the end of prefill.
        encoded: Time at which all KV was encoded.
        anchor: Time at which decoding could start.
        complete: Time at which all KV was written.
        bytes_anchor: Bytes of anchors.
        bytes_all: Bytes of all KV.
        drafted: Draft tokens on the anchor. None if there were none.
        accepted: Accepted ones among them. None if there were none.
        step: Duration of a decode step in seconds.
        events: Events of the timeline: kind, seconds, ``number`` and ``of``.
    """

    tokens: int
    cold: bool
    generated: tuple[float, ...]
    kept: tuple[float, ...]
    visible: tuple[float, ...]
    sending: float
    encoded: float
    anchor: float
    complete: float
    bytes_anchor: int
    bytes_all: int
    drafted: int | None
    accepted: int | None
    step: float
    events: tuple[tuple[str, float, int, int], ...]

    def token_times(self, clock: str) -> tuple[float, ...]:
        """Time of each token by one of :data:`CLOCKS`."""
        return getattr(self, clock)


def measure(response: TransferResponse, tokens: int, count: int, prefill_seconds: float | None = None) -> RequestTimes:
    """Compute the times of a request.

    Args:
        response: The completed request.
        tokens: Tokens of the prompt.
        count: Number of tokens to time.
        prefill_seconds: Seconds from sending the request to the end of prefill. Used without a timeline.
    """
    first_event = {event.kind: event for event in reversed(response.events)}
    zero = first_event["computed"].at if "computed" in first_event else response.sent + (prefill_seconds or 0.0)
    visible = tuple(time - zero for time in visible_times(response, count))
    generated, kept = drafting_times(response.events, count, zero)
    if not kept:
        # A server without drafts sends each token once it is computed.
        generated = kept = visible
    # The drafts of a request on its anchor are verified once.
    verified = next((event for event in response.events if event.kind == "verified" and event.early), None)
    anchor, complete = first_event.get("anchor"), first_event.get("complete")
    first_token = response.stream.times[0]
    return RequestTimes(
        tokens=tokens,
        cold=response.cached < tokens // 2,
        generated=generated,
        kept=kept,
        visible=visible,
        sending=(first_event["sending"].at if "sending" in first_event else response.sent) - zero,
        encoded=(first_event["encoded"].at if "encoded" in first_event else first_token) - zero,
        anchor=(anchor.at if anchor else first_token) - zero,
        complete=(complete.at if complete else first_token) - zero,
        bytes_anchor=anchor.number if anchor else 0,
        bytes_all=complete.number if complete else 0,
        drafted=verified.of if verified else None,
        accepted=verified.number if verified else None,
        step=step_seconds(response),
        events=tuple((event.kind, event.at - zero, event.number, event.of) for event in response.events),
    )


def visible_times(response: TransferResponse, count: int) -> list[float]:
    """Time at which the client had each of the first ``count`` tokens after that of prefill."""
    times: list[float] = []
    for time, tokens in zip(response.stream.times, response.stream.tokens, strict=True):
        times += [time] * max(0, min(tokens - 1, count) - len(times))
    return times


def drafting_times(events: Sequence[TransferEvent], count: int, zero: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times of up to ``count`` tokens by the clocks ``generated`` and ``kept``, in seconds from ``zero``. Empty without token events."""
    generated: dict[int, float] = {}
    kept: dict[int, float] = {}
    drafts: list[float] = []
    for event in events:
        num_kept = len(kept)
        if event.kind == "drafted":
            # If the drafts exceed their limit, the server drafts the newest ones again.
            drafts = [*drafts[: event.number - event.of], *[event.at] * event.of]
            for index, time in enumerate(drafts, num_kept):
                generated.setdefault(index, time)
        elif event.kind == "verified":
            for time in [*drafts[: event.number], event.at]:
                kept[len(kept)] = time
            drafts = []
        elif event.kind == "answered":
            for index in range(num_kept, num_kept + event.number):
                kept[index] = event.at
        for index in range(num_kept, len(kept)):
            generated.setdefault(index, kept[index])

    def first_times(clock: dict[int, float]) -> tuple[float, ...]:
        return tuple(clock[index] - zero for index in range(min(count, len(clock))))

    return first_times(generated), first_times(kept)


def step_seconds(response: TransferResponse) -> float:
    """Median duration of a decode step: of draft steps on the anchor, else of tokens at the client. 0 with too few tokens."""
    early = [event for event in response.events if event.kind == "drafted" and event.early]
    if len(early) > 2:
        gaps = [(b.at - a.at) / (b.number - a.number) for a, b in zip(early, early[1:]) if b.number > a.number]
    else:
        bursts = response.stream.bursts(response.stream.times[0])
        gaps = [(b.begin - a.begin) / (b.tokens - a.tokens) for a, b in zip(bursts, bursts[1:]) if b.tokens > a.tokens]
    return sorted(gaps)[len(gaps) // 2] if gaps else 0.0
