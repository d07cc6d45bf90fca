"""The time of the k-th token of a request, from the end of its prefill. The token that the prefill itself gives is not counted.

There are three clocks:

generated   The decode server has computed k tokens. Draft tokens count, also those that verification rejects.
kept        It has computed the k-th token of the answer. An accepted draft token counts from its draft step, a bonus token from its
            verification. Lynx reports this clock (section 6.1 of the paper).
visible     The client has received the token. Draft tokens are sent after they are verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.managers.kv_transfer.timeline import TransferEvent
from sglang_ext_bench.transfer.pair import Passed

CLOCKS = ("generated", "kept", "visible")


@dataclass(frozen=True)
class Request:
    """What one request showed; seconds from the end of its prefill.

    Attributes:
        tokens: of the prompt.
        cold: the prefill server did not have the prompt.
        generated, kept, visible: of each token, from the first after the prefill's.
        sending: when the first of its KV went to be encoded; below 0 where that was before the prefill's end.
        encoded: when all of it was.
        anchor, complete: when decoding could begin, and when all was written.
        bytes_anchor, bytes_all: of anchors, and of all KV.
        drafted, accepted: on the anchor, at the verification; None where none were.
        step: seconds of a decode step.
        events: as the timeline has them, (kind, seconds, number, of).
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

    def times(self, clock: str) -> tuple[float, ...]:
        """Of one of ``CLOCKS``."""
        return getattr(self, clock)


def measure(passed: Passed, tokens: int, count: int, prefill_seconds: float | None = None) -> Request:
    """A request's figures.

    Args:
        passed: that it went through both servers.
        tokens: of the prompt.
        count: tokens to look at.
        prefill_seconds: from the request to the end of its prefill, where no timeline says.
    """
    at = {event.kind: event for event in reversed(passed.events)}
    zero = at["computed"].at if "computed" in at else passed.sent + (prefill_seconds or 0.0)
    visible = tuple(time - zero for time in visible_times(passed, count))
    generated, kept = drafting_times(passed.events, count, zero)
    if not kept:
        # Who does not draft sends each token as it is computed.
        generated = kept = visible
    # Drafts of a request on its anchor are verified once.
    verified = next((event for event in passed.events if event.kind == "verified" and event.early), None)
    anchor, complete = at.get("anchor"), at.get("complete")
    first = passed.stream.times[0]
    return Request(
        tokens=tokens,
        cold=passed.cached < tokens // 2,
        generated=generated,
        kept=kept,
        visible=visible,
        sending=(at["sending"].at if "sending" in at else passed.sent) - zero,
        encoded=(at["encoded"].at if "encoded" in at else first) - zero,
        anchor=(anchor.at if anchor else first) - zero,
        complete=(complete.at if complete else first) - zero,
        bytes_anchor=anchor.number if anchor else 0,
        bytes_all=complete.number if complete else 0,
        drafted=verified.of if verified else None,
        accepted=verified.number if verified else None,
        step=step_seconds(passed),
        events=tuple((event.kind, event.at - zero, event.number, event.of) for event in passed.events),
    )


def visible_times(passed: Passed, count: int) -> list[float]:
    """When the client had each of the first ``count`` tokens after the prefill's."""
    found: list[float] = []
    for time, tokens in zip(passed.stream.times, passed.stream.tokens, strict=True):
        found += [time] * max(0, min(tokens - 1, count) - len(found))
    return found


def drafting_times(events: Sequence[TransferEvent], count: int, zero: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds from ``zero`` on the clocks ``generated`` and ``kept``; empty of a server that says nothing of tokens."""
    generated: dict[int, float] = {}
    kept: dict[int, float] = {}
    drafts: list[float] = []
    for event in events:
        before = len(kept)
        if event.kind == "drafted":
            # Where more would not fit, the newest are drafted again.
            drafts = [*drafts[: event.number - event.of], *[event.at] * event.of]
            for place, time in enumerate(drafts, before):
                generated.setdefault(place, time)
        elif event.kind == "verified":
            for time in [*drafts[: event.number], event.at]:
                kept[len(kept)] = time
            drafts = []
        elif event.kind == "answered":
            for place in range(before, before + event.number):
                kept[place] = event.at
        for place in range(before, len(kept)):
            generated.setdefault(place, kept[place])
    return tuple(tuple(clock[place] - zero for place in range(min(count, len(clock)))) for clock in (generated, kept))


def step_seconds(passed: Passed) -> float:
    """Of a decode step: the median gap of drafts on the anchor, or where there are none of tokens as the client gets them; 0 of too few."""
    early = [event for event in passed.events if event.kind == "drafted" and event.early]
    if len(early) > 2:
        gaps = [(b.at - a.at) / (b.number - a.number) for a, b in zip(early, early[1:]) if b.number > a.number]
    else:
        bursts = passed.stream.bursts(passed.stream.times[0])
        gaps = [(b.begin - a.begin) / (b.tokens - a.tokens) for a, b in zip(bursts, bursts[1:]) if b.tokens > a.tokens]
    return sorted(gaps)[len(gaps) // 2] if gaps else 0.0
