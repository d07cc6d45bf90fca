"""The queue of a simulation: requests that wait are prefilled in order, while there is room for them."""

from collections import deque
from collections.abc import Sequence

from sglang_ext.managers.kv_offload.throughput_model import OffloadPlan
from sglang_ext_bench.simulating.scenario import Request, SimulationError
from sglang_ext_bench.simulating.simulated_machine import Room, Seconds


class Intake:
    """Takes requests in.

    Attributes:
        requests: all of them.
        placement: how many may run, with full KV on the device and without.
        room: for those that run.
        seconds: of the link, over which full KV leaves the device.
        queue: numbers of those that were not taken in yet, in the order of their arrival.
        wanted: tokens of memory that the next one waits for; 0 where others have to leave first.
    """

    def __init__(self, requests: Sequence[Request], placement: OffloadPlan, room: Room, seconds: Seconds):
        self.requests = requests
        self.placement = placement
        self.room = room
        self.seconds = seconds
        self.queue = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
        self.wanted = 0.0
        self._store_free = 0.0

    @property
    def next_arrival(self) -> float:
        """Seconds at which the next one came, or comes."""
        return self.requests[self.queue[0]].arrival

    def take(self, now: float, running: dict[int, Request], reserved: float) -> list[int]:
        """Prefill what waits, while there is room, and put it to ``running``; numbers of those that were taken in.

        Args:
            now: seconds from the beginning.
            running: by number.
            reserved: tokens of memory that loads hold at most in coming iterations.
        """
        taken = []
        self.room.gone(now)
        self.wanted = 0.0
        while self.queue and self.next_arrival <= now:
            number = self.queue[0]
            request = self.requests[number]
            residents = sum(not each.offloaded for each in running.values())
            if residents >= self.placement.resident and len(running) - residents >= self.placement.offloaded:
                break
            request.offloaded = residents >= self.placement.resident
            lasting = self.room.held(request)
            wanted = lasting + (request.prompt if request.offloaded else 0)
            loads = max((each.prompt for each in (*running.values(), request) if each.offloaded), default=0)
            held = self.room.committed(running.values())
            lasts = held - self.room.leaving_tokens + lasting + loads
            if max(lasts, held + wanted) > self.room.pool:
                # Others have to leave first; until then the room is of use for loads.
                break
            if held + reserved + wanted > self.room.pool:
                self.wanted = wanted
                break
            self.queue.popleft()
            running[number] = request
            taken.append(number)
            if request.offloaded:
                self._store_free = max(self._store_free, now) + self.seconds.loading(request.prompt)
                self.room.leaving.append((self._store_free, request.prompt))
        return taken

    def room_at(self) -> float:
        """Nothing runs: seconds at which the next full KV has left the device.

        Raises:
            SimulationError: none leaves, so that the next request does not fit.
        """
        if not self.room.leaving:
            request = self.requests[self.queue[0]]
            raise SimulationError(
                f"a request of {request.prompt} + {request.output} tokens does not fit in memory for "
                f"{self.room.pool:.0f} tokens: pass more memory, or shorter requests"
            )
        return min(end for end, _ in self.room.leaving)
