"""Servers that several tests share, and the order in which these tests run, so that each starts once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from servers import EXPECTED_TOKENS, PAGED, STOCK, STRICT, VERIFIED, Server, greedy

# Fixtures of servers that several tests share, in the order in which these tests run.
SHARED = ("verified", "paged")


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
