"""Sends each message of the scheduler to the client as a separate chunk of its stream.

The tokens of a round arrive in the frontend within a millisecond, one message per token (token_streams.py). SGLang's frontend keeps one
growing state per request: it merges the messages that arrive before the client's handler has taken the last chunk. Here each streamed
request has a :class:`ChunkQueue`. SGLang gets a message when the handler asks for the next chunk. So each chunk has the tokens, log
probabilities, counts and times of one message.

With ``kv_stream_pacing`` ``even``, the chunks of a round leave at equal intervals over the expected time of the next round (:class:`Pacer`).
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any

from fastapi import BackgroundTasks, Request
from sglang.srt.managers.io_struct import BatchStrOutput, BatchTokenIDOutput, EmbeddingReqInput, GenerateReqInput, unwrap_from_pickle, wrap_as_pickle
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_ext.config import request_params
from sglang_ext.hooks.frontend import sampling_params_of

Outputs = BatchStrOutput | BatchTokenIDOutput
"""Messages with generated tokens: parallel lists with an item for each request."""

MAX_QUEUED = 256
"""Maximum queued messages per client. A slower client gets several messages in a chunk, as from stock SGLang."""
STALL_SECONDS = 2.0
"""If a client takes no chunk for this time, SGLang handles its messages at once, so that the request can end. Seconds."""
QUEUE = "kv_chunk_queue"
"""Attribute of a request's state that holds its :class:`ChunkQueue`."""
ABORT_SECONDS = 2.0
"""Seconds from the end of a stream to the abort of its unfinished requests, as in SGLang."""


async def receive_outputs(original: Callable[..., Awaitable[None]], manager: TokenizerManager, recv_obj: Any) -> None:
    """Hook around ``TokenizerManager._handle_batch_output``, which wakes the handlers: put messages for streamed requests in their queues."""
    if not isinstance(recv_obj, Outputs):
        await original(manager, recv_obj)
        return
    direct, queued = [], []
    for i, rid in enumerate(recv_obj.rids):
        queue = _queue_of(original, manager, rid)
        if queue is None or queue.take_directly():
            direct.append(i)
        else:
            queued.append((i, queue))
    if not queued:
        await original(manager, recv_obj)
        return
    select = _divider(recv_obj)
    if direct:
        await original(manager, select(direct))
    for i, queue in queued:
        round_number = recv_obj.spec_verify_ct[i] if recv_obj.spec_verify_ct else 0
        await queue.put(select([i]), round_number)


def wait_one_response(
    original: Callable, manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, request: Request | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Hook around ``TokenizerManager._wait_one_response``: notifies the queue of a stream when its client asks for the next chunk."""
    chunks = original(manager, obj, request)
    return _take_chunks(manager, obj, chunks) if _is_streamed(obj) else chunks


async def _take_chunks(manager: TokenizerManager, obj: GenerateReqInput, chunks: AsyncGenerator) -> AsyncIterator[dict[str, Any]]:
    state = manager.rid_to_state[obj.rid]
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
                # The client's handler has written the chunk, and asks for the next one. After a stall that may be in SGLang's state.
                if (queue := getattr(state, QUEUE, None)) is not None and not state.out_list:
                    await queue.request_next()
        finally:
            if (queue := getattr(state, QUEUE, None)) is not None:
                await queue.close()


class ChunkQueue:
    """Messages of one streamed request that have not entered SGLang's state yet. ``deliver`` lets SGLang handle one, and so make a chunk.

    Without a ``pacer`` messages leave as soon as the client's handler asks for them.
    """

    def __init__(self, deliver: Callable[[Outputs], Awaitable[None]], pacer: "Pacer | None") -> None:
        self._deliver = deliver
        self._pacer = pacer
        self._messages: deque[Outputs] = deque()
        self._is_wanted = True  # The handler has taken the last chunk.
        # The client has gone, or its handler has not asked for a chunk for long: messages are delivered at once.
        self._passes_all = False
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take_directly(self) -> bool:
        """Whether the caller may deliver the next message itself, because nothing delays it. The message then counts as delivered."""
        if self._passes_all:
            return True
        if self._messages or not self._is_wanted or self._pacer is not None:
            return False
        self._is_wanted = False
        return True

    async def put(self, message: Outputs, round_number: int) -> None:
        """Queue a message. An abort, and the messages before it, are delivered at once."""
        self._messages.append(message)
        if self._pacer is not None:
            self._pacer.note_arrival(round_number, monotonic())
        reason = message.finished_reasons[0]
        if self._passes_all or (reason is not None and reason.get("type") == "abort"):
            await self._deliver_all()
        else:
            await self._advance()

    async def request_next(self) -> None:
        """Deliver the next message when it has arrived and its pacing time has come."""
        self._is_wanted, self._passes_all = True, False
        _cancel(self._stall_timer)
        self._stall_timer = None
        await self._advance()

    async def close(self) -> None:
        """Deliver all messages, and delay no later ones: the client has disconnected, or has its complete answer."""
        self._passes_all = True
        _cancel(self._timer, self._stall_timer)
        await self._deliver_all()

    async def _advance(self) -> None:
        _cancel(self._timer)
        if not self._is_wanted:
            self._watch_client()
            return
        if not self._messages:
            return
        await self._deliver_all(MAX_QUEUED)
        if self._pacer is not None:
            now = monotonic()
            delay = self._pacer.next_time(len(self._messages)) - now
            if delay > 0:
                self._timer = asyncio.get_running_loop().call_later(delay, lambda: self._run(self._advance()))
                return
            self._pacer.note_departure(now)
        self._is_wanted = False
        await self._deliver(self._messages.popleft())
        self._watch_client()

    async def _deliver_all(self, num_kept: int = 0) -> None:
        while len(self._messages) > num_kept:
            await self._deliver(self._messages.popleft())

    def _watch_client(self) -> None:
        """Wait for the client for at most :data:`STALL_SECONDS`."""
        if self._messages and self._stall_timer is None:
            self._stall_timer = asyncio.get_running_loop().call_later(STALL_SECONDS, self._stall)

    def _stall(self) -> None:
        self._passes_all, self._stall_timer = True, None
        self._run(self._deliver_all())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


class Pacer:
    """Spreads the messages of a round over the expected time of the next round: the shorter of the last two rounds' times.

    So one pause, for another request's prefill, does not slow the stream. If the messages of the next round arrive before all earlier ones
    have left, all of them are spread over its expected time.
    """

    def __init__(self) -> None:
        self._round_number: int | None = None
        self._round_time = 0.0  # When the newest round's first message arrived, in seconds.
        self._durations: deque[float] = deque(maxlen=2)
        self._last_departure = 0.0

    def note_arrival(self, round_number: int, now: float) -> None:
        """A message of a round has arrived at ``now``, in seconds."""
        if round_number == self._round_number:
            return
        if self._round_number is not None:
            self._durations.append(now - self._round_time)
        self._round_number, self._round_time = round_number, now

    def next_time(self, num_queued: int) -> float:
        """Departure time of the next of ``num_queued`` messages, in seconds. 0, at once, before the duration of a round is known."""
        if not self._durations:
            return 0.0
        end = self._round_time + min(self._durations)
        return self._last_departure + (end - self._last_departure) / (num_queued + 1)

    def note_departure(self, now: float) -> None:
        """A message has left at ``now``, in seconds."""
        self._last_departure = now


def _divider(recv_obj: Outputs) -> Callable[[Sequence[int]], Outputs]:
    """A function that returns a message with only the requests at some indices."""
    num_reqs = len(recv_obj.rids)
    time_stats, customized_info = unwrap_from_pickle(recv_obj.time_stats), unwrap_from_pickle(recv_obj.customized_info)

    def select(indices: Sequence[int]) -> Outputs:
        fields = {}
        for name in recv_obj.__struct_fields__:
            value = getattr(recv_obj, name)
            # SGLang sends an empty list for a field that it does not fill.
            is_per_request = isinstance(value, list) and len(value) == num_reqs
            fields[name] = [value[i] for i in indices] if is_per_request else value
        if time_stats is not None:
            fields["time_stats"] = wrap_as_pickle([time_stats[i] for i in indices])
        if customized_info is not None:
            fields["customized_info"] = wrap_as_pickle({name: [values[i] for i in indices] for name, values in customized_info.items()})
        return type(recv_obj)(**fields)

    return select


def _queue_of(original: Callable[..., Awaitable[None]], manager: TokenizerManager, rid: str) -> ChunkQueue | None:
    """The queue of a streamed request. None if the request is unknown or not streamed."""
    state = manager.rid_to_state.get(rid)
    if state is None or not _is_streamed(state.obj):
        return None
    queue = getattr(state, QUEUE, None)
    if queue is None:

        async def deliver(message: Outputs) -> None:
            # SGLang has removed a request that it aborted in its waiting queue.
            if manager.rid_to_state.get(rid) is state:
                await original(manager, message)

        asked = sampling_params_of(manager, state.obj).get("custom_params")
        pacing = request_params.request_value(asked, request_params.PACING, manager.server_args.kv_stream_pacing)
        queue = ChunkQueue(deliver, Pacer() if pacing == request_params.EVEN else None)
        setattr(state, QUEUE, queue)
    return queue


def _is_streamed(obj: object) -> bool:
    return isinstance(obj, GenerateReqInput) and bool(obj.stream)


def abort_unfinished(original: Callable, manager: TokenizerManager, obj: GenerateReqInput) -> BackgroundTasks:
    """Replaces ``TokenizerManager.create_abort_task``: abort only the requests that were unfinished when their stream ended.

    Two seconds after the end of a stream SGLang aborts the request with its id, in case the client has disconnected. By then another
    request may have this id: a client may send a failed request again under its old id.
    """

    async def abort() -> None:
        # SGLang sets the ids when it normalizes a request. A refused request may have none.
        asked = [obj.rid] if isinstance(obj.rid, str) else obj.rid or []
        # The manager knows a request by its own id, or with n > 1 by the ids of its answers.
        rids = [rid for each in asked for rid in (each, *manager.logical_rid_to_child_rids.get(each, ()))]
        unfinished = {rid: manager.rid_to_state[rid] for rid in rids if rid in manager.rid_to_state}
        await asyncio.sleep(ABORT_SECONDS)
        for rid, state in unfinished.items():
            if manager.rid_to_state.get(rid) is state:
                manager.abort_request(rid)

    tasks = BackgroundTasks()
    tasks.add_task(abort)
    return tasks
