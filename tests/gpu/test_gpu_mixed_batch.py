"""Everything that requests may ask for at once on a GPU: overlapped, in graphs, some aborted, some retracted, cold and warm.

In deterministic mode each answer is what stock gives to that request alone; all that are not are listed. After a retraction
SGLang computes the tokens so far by a prefill, which rounds unlike the decoding that gave them: a retracted answer may go on
as one does that is asked for from any of its tokens, and of those some differ where two tokens are nearly as good. Tokens of
retracted answers are compared in float32, on a CPU (bench soak, tests/server).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest
from servers import Server
from test_gpu_decoding import EXACT, VERIFIED

from sglang_ext_bench.comparing.compare import first_difference
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.server import describe_error
from sglang_ext_bench.soaking.answers import AnswerError, DiffersFromStock, Sample, check, read_samples
from sglang_ext_bench.soaking.request_options import OPTIONS, REGEX, Option
from sglang_ext_bench.soaking.sending import abort_later, request_answer
from sglang_ext_bench.soaking.soak import server_environment
from sglang_ext_bench.soaking.traffic import SoakRequest

pytestmark = pytest.mark.server

# More ask than run at once, so that prefills join batches that decode.
BATCH = ("--cuda-graph-max-bs", "16", "--max-running-requests", "16", "--enable-custom-logit-processor")
RETRACTED_EVERY = 5
# A chat completion does not say whether it was retracted, so tools are compared in float32, on a CPU.
ASKED = {option.name: option for option in OPTIONS if option.name != "hidden-states" and option.tool_choice is None}
# Retracted answers to these are not compared further than rounding may have changed them.
PENALIZED = {"frequency-penalty", "presence-penalty", "repetition-penalty", "penalty-logprobs"}
# What goes on from a token otherwise than in the middle of an answer: it counts tokens, or its grammar begins anew.
NOT_CONTINUED = {"min-new-tokens", "json-schema", "ebnf", *PENALIZED}
# Of retracted answers in all waves, those that may go on otherwise: rounding decides between tokens that are nearly as good.
ROUNDED = 0.15
SHORT, SHARED = 4, 5
TextOf = Callable[[Sequence[int]], str]
COLD, WARM, DRAFTING = range(3)


@dataclass(frozen=True)
class Answer:
    """What came back: samples, or why there are none."""

    request: SoakRequest
    samples: tuple[Sample, ...] = ()
    error: str | None = None


@dataclass
class Told:
    """All answers: stock's to each (prompt, option), cold and warm, and of the server under test by wave."""

    stock: dict[tuple[int, str], list[tuple[Sample, ...]]] = field(default_factory=dict)
    waves: list[list[Answer]] = field(default_factory=list)
    continued: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    log: str = ""


def contexts(prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    """Four of 200 to 600 tokens, one too short to be drafted for, one that begins like the first."""
    given = [tuple(ids[:length]) for ids, length in zip(prompts, (200, 330, 460, 600))]
    given += [tuple(prompts[1][:60]), (*prompts[0][:150], *prompts[2][:120])]
    return [Prompt(f"prompt {number}", ids) for number, ids in enumerate(given)]


def wave(number: int) -> list[SoakRequest]:
    """One request of each option, or in the last wave of those that draft, every other one streamed; two are taken back."""

    def request(place: int, option: Option, prompt: int, tokens: int, **more: object) -> SoakRequest:
        rid = f"wave{number}-{place:03d}"
        values = {"kind": "plain", "stream": (place + number) % 2 == 0, "delay": 0.0, **more}
        return SoakRequest(rid, prompt, option, tokens, **values)

    plain = [request(i, option, i % 4, 32 + 8 * (i % 5)) for i, option in enumerate(ASKED.values())]
    names = ("greedy", "seeded", "regex", "stop", "logprobs")
    more = [(ASKED[name], prompt) for prompt in (SHORT, SHARED) for name in names]
    beside = [request(50 + i, option, prompt, 40) for i, (option, prompt) in enumerate(more)]
    aborted = [
        request(90, ASKED["greedy"], 1, 160, kind="abort", delay=0.05),
        request(91, ASKED["seeded"], 2, 160, kind="abort", delay=0.6),
    ]
    asked = [*plain, *aborted, *beside]
    return asked if number < DRAFTING else [each for each in asked if drafts(each)]


def drafts(request: SoakRequest) -> bool:
    """Whether a request is drafted for."""
    option = request.option
    return "min_p" not in option.sampling and not option.disallowed and request.prompt != SHORT


def ask_stock(server: Server, given: Sequence[Prompt]) -> dict[tuple[int, str], list[tuple[Sample, ...]]]:
    """Stock's answers to what the waves ask for, one at a time: from an empty cache, then once more."""
    lengths: dict[tuple[int, str], int] = {}
    for request in wave(COLD):
        key = request.prompt, request.option.name
        lengths[key] = max(request.tokens, lengths.get(key, 0))
    told: dict[tuple[int, str], list[tuple[Sample, ...]]] = {}
    for (prompt, name), tokens in lengths.items():
        server.flush_cache()
        body = ASKED[name].body(given[prompt], tokens)
        told[prompt, name] = [read_samples(server.ask(**body)) for _ in range(2)]
    return told


def send(server: Server, request: SoakRequest, given: Sequence[Prompt]) -> Answer:
    """The answer, or what came in its place."""
    try:
        with abort_later(server, request):
            return Answer(request, request_answer(server, request, given))
    except (AnswerError, OSError) as error:
        return Answer(request, error=describe_error(error))


def send_all(server: Server, requests: Sequence[SoakRequest], given: Sequence[Prompt]) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: send(server, request, given), requests))


def ask_verified(server: Server, given: Sequence[Prompt], told: Told) -> None:
    """All waves, from an empty cache."""
    server.flush_cache()
    for number in (COLD, WARM, DRAFTING):
        told.waves.append(send_all(server, wave(number), given))


def ask_further(stock: Server, given: Sequence[Prompt], told: Told, text_of: TextOf) -> None:
    """How stock goes on from the tokens of those answers that a retraction may have changed."""
    for answer, _ in differences(chain(*told.waves), told):
        option = answer.request.option
        if was_retracted(answer) and option.name not in NOT_CONTINUED:
            for s, sample in enumerate(answer.samples):
                told.continued[answer.request.rid, s] = continuations(stock, answer.request, sample.ids, given, text_of)


def continuations(
    stock: Server, request: SoakRequest, ids: tuple[int, ...], given: Sequence[Prompt], text_of: TextOf
) -> tuple[tuple[int, ...], ...]:
    """How an answer goes on from each of its tokens when what was before them is a prompt; asked for at once."""
    sampling = {name: value for name, value in request.option.sampling.items() if name != "n"}

    def body(k: int) -> dict[str, Any]:
        left = {"regex": rest_of_regex(text_of(ids[:k]))} if "regex" in sampling else {}
        single = replace(request.option, sampling={**sampling, **left}, fields={})
        return single.body(Prompt("", (*given[request.prompt].input_ids, *ids[:k])), len(ids) - k)

    bodies = [body(k) for k in range(len(ids))]
    with ThreadPoolExecutor(16) as pool:
        return tuple((*ids[:k], *told["output_ids"]) for k, told in enumerate(pool.map(lambda body: stock.ask(**body), bodies)))


def rest_of_regex(text: str) -> str:
    """What may follow the beginning of a text that :data:`REGEX` allows, which counts characters of one kind."""
    kind, least, most = re.fullmatch(r"(.+)\{(\d+),(\d+)\}", REGEX).groups()
    return f"{kind}{{{max(0, int(least) - len(text))},{max(0, int(most) - len(text))}}}"


def was_retracted(answer: Answer) -> bool:
    """Whether a retraction may have changed its log-probabilities, and how it went on."""
    return any(sample.retractions for sample in answer.samples)


def difference(answer: Answer, told: Told) -> AnswerError | None:
    """Why an answer is none of stock's two."""
    if answer.error is not None:
        return AnswerError(answer.error)
    found = None
    for expected in told.stock[answer.request.prompt, answer.request.option.name]:
        try:
            check(answer.request, answer.samples, expected)
            return None
        except AnswerError as error:
            found = found or error
    return found


def differences(answers: Iterable[Answer], told: Told) -> Iterator[tuple[Answer, AnswerError]]:
    """Answers that are none of stock's, and why."""
    for answer in answers:
        error = difference(answer, told)
        if error is not None:
            yield answer, error


def goes_on(ids: tuple[int, ...], texts: Sequence[tuple[int, ...]], start: tuple[int, ...]) -> bool:
    """Whether an answer is ``start`` up to some token, and from there one of ``texts`` after the other."""
    matched = _agreeing(ids, start)
    while matched < len(ids):
        further = max((_agreeing(ids, text) for text in texts[: matched + 1]), default=0)
        if further <= matched:
            return False
        matched = further
    return True


def _agreeing(ids: tuple[int, ...], text: tuple[int, ...]) -> int:
    at = first_difference(ids, text[: len(ids)])
    return len(ids) if at is None else at


def may_go_on_otherwise(answer: Answer, error: AnswerError) -> bool:
    """Whether an answer differs from stock's where a retraction may have changed it."""
    return isinstance(error, DiffersFromStock) and was_retracted(answer)


def is_stocks_further(answer: Answer, told: Told) -> bool:
    """Whether a retracted answer goes on as stock's do from its tokens."""
    request = answer.request
    stock = told.stock[request.prompt, request.option.name][0]
    return all(
        goes_on(sample.ids, told.continued.get((request.rid, s), ()), stock[s].ids) for s, sample in enumerate(answer.samples)
    )


def problems(answers: Sequence[Answer], told: Told) -> Iterator[str]:
    """What is wrong with answers, in words."""
    for answer, error in differences(answers, told):
        if not may_go_on_otherwise(answer, error):
            yield described(answer, error)


def rounded(answers: Iterable[Answer], told: Told) -> Iterator[str]:
    """Retracted answers that go on neither as stock's did nor as they do from any of their tokens."""
    for answer, error in differences(answers, told):
        compared = answer.request.option.name not in PENALIZED
        if compared and may_go_on_otherwise(answer, error) and not is_stocks_further(answer, told):
            yield described(answer, error)


def described(answer: Answer, error: AnswerError) -> str:
    """A line."""
    retracted = [sample.retractions for sample in answer.samples]
    fallbacks = [sample.fallback for sample in answer.samples]
    return f"{answer.request}: {error}; retracted {retracted}, fallback {fallbacks}"


@pytest.fixture(scope="module")
def text_of(model: object) -> TextOf:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def told(launch: Callable[..., Server], prompts: list[list[int]], text_of: TextOf) -> Told:
    """Two servers are started, one after the other: stock last, as what it is asked depends on the other's answers."""
    given, found = contexts(prompts), Told()
    server = launch(*EXACT, *BATCH, *VERIFIED, env=server_environment(RETRACTED_EVERY))
    ask_verified(server, given, found)
    found.log = server.describe_log() if not server.alive() else server.log.read_text(errors="replace")
    stock = launch(*EXACT, *BATCH)
    found.stock = ask_stock(stock, given)
    ask_further(stock, given, found, text_of)
    return found


@pytest.mark.parametrize("number", [COLD, WARM, DRAFTING], ids=["cold", "warm", "drafting"])
def test_each_answer_is_stocks_to_that_request_alone(told: Told, number: int) -> None:
    found = list(problems(told.waves[number], told))
    assert not found, "\n".join([f"{len(found)} of {len(told.waves[number])} answers:", *found, told.log[-3000:]])


def test_most_retracted_answers_go_on_as_stocks_do_from_their_tokens(told: Told) -> None:
    retracted, found = sum(map(was_retracted, chain(*told.waves))), list(rounded(chain(*told.waves), told))
    assert len(found) <= ROUNDED * retracted, "\n".join([f"{len(found)} of {retracted} retracted answers:", *found])


def test_grammars_hold_for_whoever_was_retracted(told: Told, text_of: TextOf) -> None:
    shorter = REGEX.replace("60,", "0,")
    for answer in [answer for answers in told.waves for answer in answers]:
        if answer.request.option.sampling.get("regex") == REGEX:
            for sample in answer.samples:
                text = text_of(sample.ids)
                assert re.fullmatch(shorter, text), f"{answer.request}: {text!r}"


def test_the_waves_had_everything_in_them(told: Told) -> None:
    samples = [sample for answers in told.waves for answer in answers for sample in answer.samples]
    assert sum(sample.retractions for sample in samples) > 0, "nobody was retracted"
    assert sum(not sample.retractions for sample in samples) > len(samples) / 4, "too few answers are compared whole"
    assert any(sample.is_aborted for sample in samples), "nobody was aborted in time"
    drafting = [sample for answer in told.waves[DRAFTING] for sample in answer.samples]
    assert sum(sample.drafts for sample in drafting) > sum(sample.accepted for sample in drafting) > 4 * len(drafting)
    assert {"min-p", "custom-logit-processor"} <= {sample.fallback for sample in samples}
    stocks = [key for key, (cold, warm) in told.stock.items() if [a.ids for a in cold] != [a.ids for a in warm]]
    print(f"stock's answers from a cache that are others than those without: {stocks}")
    assert "disable_overlap_schedule=False" in told.log and "cuda graph: True" in told.log
