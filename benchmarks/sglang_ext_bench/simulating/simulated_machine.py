"""The machine of a simulation: seconds of its forwards and loads, and the memory that requests hold of it.

Both are those of :mod:`sglang_ext.managers.kv_offload.costs`, with each request's own lengths.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from sglang_ext.managers.kv_offload.costs import Costs
from sglang_ext_bench.simulating.scenario import Request


@dataclass(frozen=True)
class Seconds:
    """What a machine takes for some requests.

    Attributes:
        costs: of the machine.
        kv_token: bytes of full KV of a token.
        budget: share of the prompt that copies keep.
    """

    costs: Costs
    kv_token: float
    budget: float

    def plain(self, requests: Collection[Request], steps: int) -> float:
        """Steps of plain decoding."""
        return steps * self._reading(sum(each.prompt + each.produced + (steps - 1) / 2 for each in requests))

    def drafting(self, requests: Collection[Request]) -> float:
        """The drafts of a round."""
        drafts = self.costs.drafts
        # A draft step reads what drafts before it wrote, too: on average of a round half of them.
        tokens = sum(self.budget * each.prompt + each.produced + each.drafts + drafts / 2 for each in requests)
        return drafts * self._reading(tokens)

    def verifying(self, requests: Collection[Request]) -> float:
        """A forward over full KV that checks all drafts."""
        read = self._reading(sum(each.prompt + each.produced + each.drafts for each in requests))
        return read + self.costs.token_seconds * sum(each.drafts + 1 for each in requests)

    def loading(self, tokens: float) -> float:
        """Full KV of so many tokens on the link, in either direction."""
        return tokens * self.kv_token / self.costs.link

    def _reading(self, tokens: float) -> float:
        return (self.costs.weights + tokens * self.kv_token) / self.costs.bandwidth


@dataclass
class Room:
    """The device's memory for KV, in tokens.

    Attributes:
        pool: what there is.
        budget: share of the prompt that copies keep.
        leaving: seconds at which full KV has left the device, and its tokens.
    """

    pool: float
    budget: float
    leaving: list[tuple[float, float]] = field(default_factory=list)

    def held(self, request: Request) -> float:
        """By a request while it runs, its loads aside. Of its output it is charged half: the mean while it runs."""
        return request.prompt * (self.budget + (not request.offloaded)) + request.output / 2

    @property
    def leaving_tokens(self) -> float:
        """By full KV that is on its way from the device."""
        return sum(tokens for _, tokens in self.leaving)

    def committed(self, running: Collection[Request]) -> float:
        """By all that run, and by what is on its way from the device."""
        return sum(self.held(each) for each in running) + self.leaving_tokens

    def gone(self, now: float) -> None:
        """Full KV that has left by ``now`` holds nothing any more."""
        self.leaving = [(end, tokens) for end, tokens in self.leaving if end > now]
