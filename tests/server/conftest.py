"""Real SGLang servers for tests: stock SGLang for the whole session, and one other at a time.

``launch(*flags)`` starts the other one, or gives it back while it runs. Two of them serve many tests, which
run one after the other: see :data:`SHARED`. With ``--numprocesses`` and ``--dist=loadgroup`` each process has
its own servers and its share of the cores.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servers import EXPECTED_TOKENS, PAGED, STOCK, STRICT, VERIFIED, Server, Servers, greedy

ROOT = Path(__file__).parents[2]
# Fixtures of servers that several tests share, in the order in which these tests run.
SHARED = ("verified", "paged")


def pytest_configure() -> None:
    """Servers of several processes share the cores."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first, then the tests of each shared server together, so that it starts once."""
    here = Path(__file__).parent
    groups = {item: group(item) for item in items if item.path.is_relative_to(here)}
    turns = {name: turn for turn, name in enumerate(SHARED)}
    items.sort(key=lambda item: turns.get(groups[item], len(SHARED)) if item in groups else -1)
    for item, name in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))


def group(item: pytest.Item) -> str:
    """The tests that run one after the other in one process: those of a shared server, or of a file."""
    return next((name for name in SHARED if name in getattr(item, "fixturenames", ())), item.path.stem)


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model's folder."""
    from sglang_ext.demo_model import prepare

    return prepare(ROOT / ".cache/models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def launch(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start (or reuse) a server with these flags."""
    servers = Servers(model, tmp_path_factory.mktemp("servers"))
    yield servers.launch
    servers.stop()


@pytest.fixture
def stock(launch: Callable[..., Server]) -> Server:
    """Stock SGLang."""
    return launch(*STOCK)


@pytest.fixture
def verified(stock: Server, launch: Callable[..., Server]) -> Server:
    """Stock's flags, and verified decoding on a quarter of the KV."""
    return launch(*VERIFIED)


@pytest.fixture
def paged(stock: Server, launch: Callable[..., Server]) -> Server:
    """Verified decoding in pages of 16, on an eighth of the KV; without seeds, its noise is its own."""
    return launch(*PAGED, env=STRICT)


@pytest.fixture(scope="session")
def expected(launch: Callable[..., Server], prompts: list[list[int]]) -> list[list[int]]:
    """Stock's first greedy tokens after each prompt, one request at a time."""
    return [answer["output_ids"] for answer in launch(*STOCK).ask_all(prompts, 1, **greedy(EXPECTED_TOKENS))]


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    """Token ids of real text: source code and prose, 300 to 700 tokens each."""
    import argparse
    import inspect
    import textwrap

    import pydoc_data.topics
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    topics = "\n".join(list(pydoc_data.topics.topics.values())[:12])
    texts = [inspect.getsource(argparse), topics, inspect.getsource(textwrap), topics[9000:]]
    lengths = [300, 430, 560, 700]
    return [tokenizer.encode(text[:8000])[:length] for text, length in zip(texts, lengths)]
