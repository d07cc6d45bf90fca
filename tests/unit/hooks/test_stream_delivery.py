"""Messages that arrive together reach a stream's client one chunk each; with even pacing they leave over the time of a round."""

import asyncio
import statistics
import time
from inspect import unwrap
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

from sglang_ext.hooks.stream_delivery import MAX_QUEUED, STALL_SECONDS, Pacer, receive_outputs, wait_one_response

WORDS = ["a", "bc", "def", "g", "hi"]
LOG = SimpleNamespace(log_finished_request=lambda *given, **named: None)


class Stats:
    """Times that SGLang keeps of a request, of which nothing is asked here."""

    first_token_time = response_sent_to_client_time = 1.0
    trace_ctx = SimpleNamespace(tracing_enable=False)

    def set_finished_time(self):
        pass

    def get_e2e_latency(self):
        return 0.0


class Manager(TokenizerManager):
    """SGLang's frontend as far as it hands chunks to clients."""

    def __init__(self, rids, incremental=False, stream=True, **params):
        self.server_args = SimpleNamespace(batch_notify_size=16, speculative_algorithm=None, kv_stream_pacing="burst")
        self.preferred_sampling_params, self.enable_metrics, self.enable_lora = None, False, False
        self.incremental_streaming_output, self.request_logger = incremental, LOG
        self.dump_requests_folder = self.crash_dump_folder = ""
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self.child_rid_to_logical_rid, self.logical_rid_to_child_rids = {}, {}
        self.rid_to_state = {}
        for rid in rids:
            obj = GenerateReqInput(text="", rid=rid, stream=stream, sampling_params=params)
            self.rid_to_state[rid] = ReqState([], False, asyncio.Event(), obj, Stats())

    def config_value(self, name):
        return None


def message(rids, words, count, finish=None, round_number=1):
    """The detokenizer's message for one token of each request."""
    empty = {field: None for field in BatchStrOutput.__struct_fields__ if field not in ("rids", "http_worker_ipcs")}
    per_request = {
        "finished_reasons": finish, "output_strs": words, "output_ids": count, "prompt_tokens": 3, "completion_tokens": count,
        "reasoning_tokens": 0, "cached_tokens": 0, "retraction_counts": 0, "spec_verify_ct": round_number,
    }  # fmt: skip
    lists = {name: [value] * len(rids) for name, value in per_request.items()}
    lists["output_ids"] = [[count]] * len(rids)
    return BatchStrOutput(rids=list(rids), **{**empty, **lists})


def burst(rids, finish={"type": "length"}):  # noqa: B006
    return [message(rids, word, i + 1, finish if i == len(WORDS) - 1 else None) for i, word in enumerate(WORDS)]


async def read(manager, rid, chunks, delay=0.0):
    """A client's handler: it writes each chunk before it asks for the next one."""
    async for chunk in wait_one_response(unwrap(TokenizerManager._wait_one_response), manager, manager.rid_to_state[rid].obj):
        chunks.append((time.monotonic(), chunk["text"], list(chunk["output_ids"]), chunk["meta_info"]["completion_tokens"]))
        await asyncio.sleep(delay)


def within(coroutine, seconds=20):
    """What a coroutine returns; one that waits for chunks that do not come fails."""

    async def limited():
        return await asyncio.wait_for(coroutine, seconds)

    return asyncio.run(limited())


async def receive(manager, messages):
    for each in messages:
        await receive_outputs(unwrap(TokenizerManager._handle_batch_output), manager, each)


def texts(incremental):
    return WORDS if incremental else ["".join(WORDS[: i + 1]) for i in range(len(WORDS))]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_messages_that_arrive_together_are_chunks_of_their_own(incremental, delay):
    async def run():
        manager, chunks = Manager("ab", incremental), {"a": [], "b": []}
        readers = [asyncio.ensure_future(read(manager, rid, chunks[rid], delay)) for rid in "ab"]
        await asyncio.sleep(0)
        await receive(manager, burst("ab"))
        await asyncio.gather(*readers)
        assert not manager.rid_to_state
        return chunks

    for found in within(run()).values():
        assert [chunk[1] for chunk in found] == texts(incremental)
        assert [chunk[3] for chunk in found] == [1, 2, 3, 4, 5]
        ids = [[i + 1] if incremental else list(range(1, i + 2)) for i in range(len(WORDS))]
        assert [chunk[2] for chunk in found] == ids


def test_messages_that_come_before_the_client_reads_wait_for_it():
    async def run():
        manager, chunks = Manager("a"), []
        await receive(manager, burst("a"))
        await read(manager, "a", chunks)
        return chunks

    assert [chunk[1] for chunk in within(run())] == texts(False)


def test_a_slow_client_does_not_hold_up_another_one():
    async def run():
        manager, slow, fast = Manager("ab"), [], []
        reader = asyncio.ensure_future(read(manager, "a", slow, delay=0.2))
        other = asyncio.ensure_future(read(manager, "b", fast))
        await asyncio.sleep(0)
        await receive(manager, burst("ab"))
        await other
        assert len(fast) == len(WORDS) and len(slow) == 1
        await reader
        assert len(slow) == len(WORDS)

    within(run())


def test_what_a_very_slow_client_has_not_read_is_merged():
    count = MAX_QUEUED + 3
    words = [f"{number} " for number in range(count)]

    async def run():
        manager, chunks = Manager("a", incremental=True), []
        await receive(manager, [message("a", word, i + 1, {"type": "length"} if i + 1 == count else None) for i, word in enumerate(words)])
        await read(manager, "a", chunks)
        return chunks

    # The first is taken at once. Of the others as many wait as may, less the one that is taken next.
    assert [chunk[1] for chunk in within(run())] == ["0 ", "1 2 3 ", *words[4:]]


@pytest.mark.parametrize("taken", [1, 3])
@pytest.mark.parametrize("incremental", [False, True])
def test_the_request_of_a_client_that_stopped_reading_ends(incremental, taken):
    async def run():
        manager = Manager("a", incremental=incremental)
        obj = manager.rid_to_state["a"].obj
        stream = wait_one_response(unwrap(TokenizerManager._wait_one_response), manager, obj)
        await receive(manager, burst("a"))
        chunks = [await anext(stream) for _ in range(taken)]
        assert manager.rid_to_state
        await asyncio.sleep(STALL_SECONDS + 0.2)
        assert not manager.rid_to_state
        return chunks + [chunk async for chunk in stream]

    # It gets what waited for it in one chunk, as from stock SGLang.
    rest = "".join(WORDS[taken:]) if incremental else "".join(WORDS)
    assert [chunk["text"] for chunk in within(run())] == [*texts(incremental)[:taken], rest]


def test_a_client_that_reads_again_gets_chunks_of_single_tokens_again():
    async def run():
        manager, chunks = Manager("a", incremental=True), []
        await receive(manager, burst("a", finish=None))
        await asyncio.sleep(STALL_SECONDS + 0.2)
        reader = asyncio.ensure_future(read(manager, "a", chunks))
        await asyncio.sleep(0.01)
        await receive(manager, burst("a"))
        await reader
        return chunks

    assert [chunk[1] for chunk in within(run())] == ["".join(WORDS), *WORDS]


@pytest.mark.parametrize("taken", [1, 3])
def test_the_state_of_a_request_whose_client_has_gone_ends_with_its_answer(taken):
    async def run():
        manager, seen = Manager("a"), 0
        chunks = wait_one_response(unwrap(TokenizerManager._wait_one_response), manager, manager.rid_to_state["a"].obj)
        await receive(manager, burst("a")[:-1])
        async for _ in chunks:
            seen += 1
            if seen == taken:
                break
        await chunks.aclose()
        await receive(manager, burst("a")[-1:])
        return manager.rid_to_state

    assert within(run()) == {}


def test_an_abort_does_not_wait_for_the_client():
    async def run():
        manager = Manager("a")
        await receive(manager, burst("a", finish={"type": "abort", "message": "", "status_code": None}))
        return manager.rid_to_state

    assert within(run()) == {}


def test_an_answer_that_is_not_streamed_is_one_chunk():
    async def run():
        manager, chunks = Manager("a", stream=False), []
        reader = asyncio.ensure_future(read(manager, "a", chunks))
        await asyncio.sleep(0)
        await receive(manager, burst("a"))
        await reader
        return chunks

    assert [chunk[1:] for chunk in within(run())] == [("".join(WORDS), [1, 2, 3, 4, 5], 5)]


ROUND = 0.3


async def read_rounds(rounds, params, gap=ROUND):
    """When chunks of rounds leave, in seconds after the second round, and when the client had them all."""
    manager, chunks = Manager("a", **params), []
    reader = asyncio.ensure_future(read(manager, "a", chunks))
    await asyncio.sleep(0)
    for number in range(rounds):
        last = number == rounds - 1
        parts = burst("a", {"type": "length"} if last else None)
        for part in parts:
            part.spec_verify_ct = [number]
        if number == 1:
            start = time.monotonic()
        await receive(manager, parts)
        if not last:
            await asyncio.sleep(gap)
    await asyncio.wait_for(reader, 5)
    return [chunk[0] - start for chunk in chunks]


def test_even_pacing_spreads_a_round_over_the_time_of_the_next_one():
    times = within(read_rounds(3, {"custom_params": {"kv_stream_pacing": "even"}}))
    gaps = [later - earlier for earlier, later in zip(times[5:], times[6:])]
    assert len(times) == 15
    assert statistics.median(gaps) > ROUND / len(WORDS) / 2
    # The last round takes a round, too.
    assert 2 * ROUND * 0.8 < times[-1] < 3 * ROUND


def test_without_pacing_a_round_leaves_at_once():
    times = within(read_rounds(3, {}))
    assert times[9] - times[5] < ROUND / 2 and times[14] - times[10] < ROUND / 2 and times[10] - times[9] > ROUND / 2


def departures(arrivals):
    """When a pacer lets messages leave that arrive at times, in seconds, as (time, round)."""
    pacer, queued, left, now = Pacer(), 0, [], 0.0
    pending = list(arrivals)
    while pending or queued:
        due = max(now, pacer.next_time(queued)) if queued else float("inf")
        if pending and pending[0][0] <= due:
            now, number = pending.pop(0)
            pacer.note_arrival(number, now)
            queued += 1
            continue
        now = due
        pacer.note_departure(now)
        left.append(now)
        queued -= 1
    return left


def test_no_token_leaves_later_than_a_round_after_the_next_one():
    # A pause of two seconds between rounds of a tenth.
    starts = [0.0, 0.1, 0.2, 2.2, 2.3, 2.4]
    arrivals = [(start + i * 1e-3, number) for number, start in enumerate(starts) for i in range(8)]
    left = departures(arrivals)
    assert left == sorted(left) and len(left) == len(arrivals)
    ends = [starts[(i // 8) + 1] if i // 8 + 1 < len(starts) else starts[-1] for i in range(len(left))]
    assert all(time <= end + 0.1 + 1e-9 for time, end in zip(left, ends))
    assert all(earlier[0] <= time for earlier, time in zip(arrivals, left))
