"""Real SGLang servers for tests: stock SGLang for the whole session, and one other at a time.

``launch(*flags)`` starts the other one, or gives it back while it runs. With ``--numprocesses`` and
``--dist=loadgroup`` each process has its own servers and its share of the cores.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from model_fixtures import demo_model, model  # noqa: F401
from preloaded import Preloaded
from servers import OFFLINE, ON_GPU, QUICK_START, Server, Servers


def pytest_configure(config: pytest.Config) -> None:
    """Processes of tests, and their servers, share the cores; the process that only hands out tests must not say how."""
    if config.getoption("numprocesses", None):
        return
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it read the variable when it was loaded


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded | None]:
    """A process that has loaded SGLang, which servers are forks of; none where there is a GPU, as no fork can use it."""
    made = None if ON_GPU else Preloaded({**OFFLINE, **QUICK_START})
    yield made
    if made is not None:
        made.stop()


@pytest.fixture(scope="session")
def launch(
    model: Path, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded | None
) -> Iterator[Callable[..., Server]]:
    """Start (or reuse) a server with these flags."""
    servers = Servers(model, tmp_path_factory.mktemp("servers"), preloaded)
    yield servers.launch
    servers.stop()


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    """Token ids of real text: source code and prose, 300 to 700 tokens each."""
    import argparse
    import inspect
    import pydoc_data.topics
    import textwrap

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    topics = "\n".join(list(pydoc_data.topics.topics.values())[:12])
    texts = [inspect.getsource(argparse), topics, inspect.getsource(textwrap), topics[9000:]]
    lengths = [300, 430, 560, 700]
    return [tokenizer.encode(text[:8000])[:length] for text, length in zip(texts, lengths)]
