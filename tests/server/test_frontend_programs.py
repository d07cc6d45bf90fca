"""SGLang frontend programs give a verified server's users the states of a stock server."""

import argparse
import inspect
import textwrap

import pytest
import sglang as sgl
from servers import Server
from sglang.lang.interpreter import ProgramState

pytestmark = pytest.mark.server

# Real text, long enough that drafting starts (128 tokens).
SOURCE = inspect.getsource(textwrap)[1000:2600]
SOURCES = [{"source": inspect.getsource(argparse)[start : start + 1400]} for start in (0, 4000, 9000)]
SUBJECTS = [" text", " numbers", " pictures", " the network"]
# Choices are scored in a batch, whose matrix products round by its shape.
LOGPROB_TOLERANCE = 1e-3


@sgl.function
def complete(s: ProgramState, source: str) -> None:
    """Plain generation, twice, so that the second starts from a cached prefix."""
    s += source + sgl.gen("first", max_tokens=16, temperature=0)
    s += "\n\n# In other words, " + sgl.gen("second", max_tokens=12, temperature=0, stop="\n\n")


@sgl.function
def choose(s: ProgramState, source: str) -> None:
    """A choice by input logprobs, then generation that depends on it."""
    s += f"A Python module:\n\n{source}\n\nIt works on"
    s += sgl.select("subject", choices=SUBJECTS)
    s += " and it" + sgl.gen("why", max_tokens=16, temperature=0)


@sgl.function
def branch(s: ProgramState, source: str) -> None:
    """Two branches that run at once on one shared prefix, then joined."""
    s += source
    strength, weakness = s.fork(2)
    strength += "\n\n# Its greatest strength is" + sgl.gen("text", max_tokens=12, temperature=0)
    weakness += "\n\n# Its greatest weakness is" + sgl.gen("text", max_tokens=12, temperature=0)
    s["strength"], s["weakness"] = strength["text"], weakness["text"]
    s += strength["text"] + weakness["text"] + sgl.gen("joined", max_tokens=16, temperature=0)


@sgl.function
def constrain(s: ProgramState, source: str) -> None:
    """Generation under a regular expression, between two that are free."""
    s += source + sgl.gen("before", max_tokens=16, temperature=0)
    s += "\n\nThe year in which it was written: "
    s += sgl.gen("year", max_tokens=8, temperature=0, regex=r"(19|20)[0-9]{2}")
    s += ". It" + sgl.gen("after", max_tokens=16, temperature=0)


@pytest.fixture
def backends(stock: Server, verified: Server) -> list[sgl.RuntimeEndpoint]:
    """Stock SGLang, and the server that drafts; both with an empty prefix cache."""
    for server in (stock, verified):
        server.flush_cache()
    return [sgl.RuntimeEndpoint(server.url) for server in (stock, verified)]


def run(program: sgl.lang.ir.SglFunction, backends: list[sgl.RuntimeEndpoint]) -> list[ProgramState]:
    """One run on each server."""
    return [program.run(source=SOURCE, backend=backend) for backend in backends]


def values(state: ProgramState, *names: str) -> dict[str, str]:
    """The whole text of a state and its variables."""
    return {"text": state.text(), **{name: state[name] for name in names}}


def drafted(state: ProgramState, name: str) -> int:
    """Tokens drafted for a variable."""
    return state.get_meta_info(name)["kv_drafts"]


def test_gen_continues_from_its_own_output_as_stock_does(backends) -> None:
    expected, found = run(complete, backends)
    assert values(found, "first", "second") == values(expected, "first", "second")
    assert drafted(found, "first") > 0 and drafted(found, "second") > 0
    assert "kv_drafts" not in expected.get_meta_info("first")


def test_select_takes_stocks_choice_with_its_scores(backends) -> None:
    expected, found = run(choose, backends)
    assert values(found, "subject", "why") == values(expected, "subject", "why")
    assert drafted(found, "why") > 0
    scores = [state.get_meta_info("subject")["normalized_prompt_logprobs"] for state in (expected, found)]
    assert scores[1] == pytest.approx(scores[0], abs=LOGPROB_TOLERANCE)


def test_forks_share_a_prefix_and_join_as_stocks(backends) -> None:
    names = ("strength", "weakness", "joined")
    expected, found = run(branch, backends)
    assert values(found, *names) == values(expected, *names)
    assert drafted(found, "joined") > 0


def test_regex_gives_stocks_value_and_its_neighbours_draft(backends) -> None:
    names = ("before", "year", "after")
    expected, found = run(constrain, backends)
    assert values(found, *names) == values(expected, *names)
    assert found["year"][:2] in ("19", "20") and len(found["year"]) == 4
    assert found.get_meta_info("year")["kv_drafts"] > 0, "a grammar is drafted, too"
    assert drafted(found, "before") > 0 and drafted(found, "after") > 0


def test_a_batch_of_programs_gives_stocks_states_in_order(backends) -> None:
    states = []
    for backend in backends:
        batch = complete.run_batch(SOURCES, backend=backend, num_threads=len(SOURCES))
        states.append([values(state, "first", "second") for state in batch])
    expected, found = states
    assert found == expected
    assert len({state["first"] for state in found}) == len(SOURCES)
