"""Servers that several tests share, and the order in which tests run, so that each starts once and processes end together."""

import inspect
import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_model
from filelock import FileLock
from servers import CROWDED, EXPECTED_TOKENS, LEFT, ON_GPU, PAGED, SEVERAL, STOCK, STRICT, VERIFIED, Server, greedy

# Fixtures of servers that several tests share, in the order in which these tests run.
SHARED = ("verified", "paged", "crowded", "several")
# Tokens of a request of each kind.
KIND_TOKENS = 12
# Fixtures of answers that stock gives once a run.
ANSWERS = ("expected", "penalized", "worded", "kinds")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of servers first, in groups that one process runs; unit tests are short, and fill what is left of each process."""
    here = Path(__file__).parent
    groups = {item: group(item) for item in items if item.path.is_relative_to(here)}
    items.sort(key=lambda item: turn(item) if item in groups else (3, 0))
    for item, name in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))


def group(item: pytest.Item) -> str:
    """The tests that run one after the other in one process: those of a shared server, or of a file."""
    return next((name for name in SHARED if name in names_of(item)), item.path.stem)


def turn(item: pytest.Item) -> tuple[int, int]:
    """First those whose server most tests share, which begin with stock's answers; then those that do not wait for these."""
    names = names_of(item)
    if SHARED[0] in names:
        return 0, 0
    if "stock" not in names and "once" not in names:
        return 1, 0
    return 2, next((place for place, name in enumerate(SHARED) if name in names), 0)


def names_of(item: pytest.Item) -> tuple[str, ...]:
    """Of its fixtures."""
    return getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def model(demo_model: Path) -> Path:
    """The folder of the model that servers serve: on a CPU a small part of the demo model, on a GPU all of it."""
    return demo_model if ON_GPU else small_model.prepare(demo_model)


@pytest.fixture(scope="session")
def model_config(model: Path) -> dict[str, Any]:
    """Hugging Face's ``config.json`` of the model."""
    return json.loads((model / "config.json").read_text())


@pytest.fixture(scope="session")
def token_bytes(model_config: dict[str, Any]) -> int:
    """Bytes of a token's full KV, over all layers."""
    return 2 * 4 * model_config["num_hidden_layers"] * model_config["num_key_value_heads"] * model_config["head_dim"]


@pytest.fixture
def stock(request: pytest.FixtureRequest, launch: Callable[..., Server]) -> Server:
    """Stock SGLang; where tests run in several processes, it first answers what the others wait for."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in ANSWERS:
            request.getfixturevalue(name)
    return launch(*STOCK)


@pytest.fixture
def verified(stock: Server, launch: Callable[..., Server]) -> Server:
    """Stock's flags, and verified decoding on a quarter of the KV."""
    return launch(*VERIFIED)


@pytest.fixture
def paged(stock: Server, launch: Callable[..., Server]) -> Server:
    """Verified decoding in pages of 16, on an eighth of the KV; without seeds, its noise is its own."""
    return launch(*PAGED, env=STRICT)


@pytest.fixture
def crowded(stock: Server, launch: Callable[..., Server]) -> Server:
    """Verified decoding in a small pool, on a quarter of the KV, with strict checks; prefixes go to the host."""
    return launch(*CROWDED, env=STRICT | LEFT)


@pytest.fixture
def several(stock: Server, launch: Callable[..., Server]) -> Server:
    """Verified decoding on KIVI's blocks, or on two budgets of SnapKV for those who ask for it, with strict checks."""
    return launch(*SEVERAL, env=STRICT)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """What ``make`` gives, in JSON, by name: the first process of a run that wants it makes it, the others read it."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def read(name: str, make: Callable[[], Any]) -> Any:
        file = shared / f"{name}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(make()))
        return json.loads(file.read_text())

    return read


@pytest.fixture(scope="session")
def expected(once: Callable, launch: Callable[..., Server], prompts: list[list[int]]) -> list[list[int]]:
    """Stock's first greedy tokens after each prompt, one request at a time."""

    def ask() -> list[list[int]]:
        return [answer["output_ids"] for answer in launch(*STOCK).ask_all(prompts, 1, **greedy(EXPECTED_TOKENS))]

    return once("expected", ask)


@pytest.fixture(scope="session")
def penalized(once: Callable, launch: Callable[..., Server], prompts: list[list[int]]) -> list[tuple[dict[str, Any], Any]]:
    """Two requests with penalties, each with stock's answer to it alone."""
    penalties = ({"frequency_penalty": 0.6}, {"repetition_penalty": 1.2, "presence_penalty": 0.3})
    bodies = [{"input_ids": ids, **greedy(64, **more)} for ids, more in zip(prompts, penalties)]
    answers = once("penalized", lambda: [launch(*STOCK).ask(**body) for body in bodies])
    return list(zip(bodies, answers))


@pytest.fixture(scope="session")
def worded(once: Callable, launch: Callable[..., Server], prompts: list[list[int]]) -> tuple[dict[str, Any], Any]:
    """A request whose grammar shows when it is advanced over tokens that are not part of the answer, and stock's answer."""
    body = {"input_ids": prompts[0], **greedy(48, regex=r"(yes|no)( and (yes|no)){8}", ignore_eos=False)}
    return body, once("worded", lambda: launch(*STOCK).ask(**body))


@pytest.fixture(scope="session")
def kinds(once: Callable, launch: Callable[..., Server], prompts: list[list[int]]) -> dict[str, tuple[dict[str, Any], Any]]:
    """A request of each of five kinds, with a prompt of its own that is long enough for a copy, and stock's answer."""
    sampled = {"max_new_tokens": KIND_TOKENS, "temperature": 0.8, "top_k": 20, "sampling_seed": 7, "ignore_eos": True}
    bodies = {
        "greedy": {"input_ids": prompts[0], **greedy(KIND_TOKENS)},
        "seeded": {"input_ids": prompts[1][:303], "sampling_params": sampled},
        "log-probabilities": {"input_ids": prompts[2][:291], "return_logprob": True, "top_logprobs_num": 2, **greedy(KIND_TOKENS)},
        "grammar": {"input_ids": prompts[3][:307], **greedy(KIND_TOKENS, regex=r"(yes|no)( and (yes|no)){3}", ignore_eos=False)},
        "penalty": {"input_ids": prompts[1][:297], **greedy(KIND_TOKENS, frequency_penalty=0.5, presence_penalty=0.3)},
    }
    answers = once("kinds", lambda: {kind: launch(*STOCK).ask(**body) for kind, body in bodies.items()})
    return {kind: (bodies[kind], answer) for kind, answer in answers.items()}


@pytest.fixture(scope="session")
def of_all_layers(once: Callable, launch: Callable[..., Server], demo_model: Path, prompts: list[list[int]]) -> dict[str, list[Any]]:
    """What stock answers with all of the demo model, which is surer of its tokens: as ``expected`` of two prompts, and texts after those of
    ``examples/offline_engine.py``, where SGLang takes numbers of 16 bits."""

    def ask() -> dict[str, list[Any]]:
        server, greedily = launch(*STOCK, "--model-path", str(demo_model)), {"temperature": 0, "max_new_tokens": 48}
        tokens = [answer["output_ids"] for answer in server.ask_all(prompts[:2], 1, **greedy(EXPECTED_TOKENS))]
        begun = [inspect.getsource(module)[:2000] for module in (textwrap, inspect)]
        return {"tokens": tokens, "texts": [server.ask(text=text, sampling_params=greedily)["text"] for text in begun]}

    return once("of_all_layers", ask)
