"""New weights: nothing computed with the old ones stays, and answers are stock's with the new ones."""

import base64
import json
import pickle
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from safetensors import safe_open
from servers import Server, greedy

pytestmark = pytest.mark.server

CHANGED = "model.layers.3.input_layernorm.weight"


def update(server: Server, weights: torch.Tensor) -> None:
    """Put ``weights`` in the place of :data:`CHANGED`, over HTTP."""
    settle(server)
    answer = server.request("update_weights_from_tensor", {"serialized_named_tensors": [pickled([(CHANGED, weights)])]})
    assert answer["success"], answer


def pickled(value: Any) -> str:
    """A value as tensors travel in the body of an update."""
    return base64.b64encode(pickle.dumps(value)).decode()


def settle(server: Server) -> None:
    """SGLang ends where it cannot flush its cache then: a request that was just answered is in its batch for another iteration.

    Each of these is answered by an iteration of its own.
    """
    for _ in range(3):
        server.request("server_info")


def old_weights(model: Path) -> torch.Tensor:
    """What the checkpoint has for :data:`CHANGED`."""
    with safe_open(model / "model.safetensors", "pt") as file:
        return file.get_tensor(CHANGED)


def test_weights_from_tensors_change_the_answer_as_they_change_stocks(stock, verified, prompts, model):
    body = {"input_ids": prompts[1], **greedy(24)}
    before = verified.ask(**body)
    old = old_weights(model)
    answers = []
    try:
        for server in (stock, verified):
            update(server, old * 1.5)
            answers.append(server.ask(**body))
    finally:
        for server in (stock, verified):
            update(server, old)
    expected, found = answers
    assert found["output_ids"] == expected["output_ids"] != before["output_ids"]
    assert found["meta_info"]["cached_tokens"] == 0
    assert found["meta_info"]["kv_drafts"] > 0
    assert verified.ask(**body)["output_ids"] == before["output_ids"]


def test_weights_from_disk_drop_what_was_cached_and_serve_on(verified, prompts, model):
    body = {"input_ids": prompts[1], **greedy(16)}
    before = verified.ask(**body)
    settle(verified)
    answer = verified.request("/update_weights_from_disk", {"model_path": str(model)})
    assert answer["success"]
    after = verified.ask(**body)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"] == before["output_ids"]


def refused(server: Server, path: str, **body: Any) -> str:
    """The reason with which an update is refused, with status 400."""
    with pytest.raises(HTTPError) as error:
        server.request(path, body)
    assert error.value.code == 400
    return json.loads(error.value.read())["message"]


def test_an_update_that_cannot_be_carried_out_is_refused_and_the_server_goes_on(verified, prompts):
    body = {"input_ids": prompts[1], **greedy(16)}
    before = verified.ask(**body)
    settle(verified)
    one = {"names": [CHANGED], "dtypes": ["float32"], "shapes": [[576]]}
    told = refused(verified, "update_weights_from_distributed", group_name="nobody", **one)
    assert "Group nobody not in []" in told and "init_weights_update_group" in told
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 1, "group_name": ""}
    assert "Group name cannot be empty" in refused(verified, "init_weights_update_group", **group)
    for tensors in ([pickled("no tensors")], [pickled([(CHANGED, torch.zeros(3))])], [base64.b64encode(b"garbage").decode()], []):
        assert "UpdateWeightsFromTensor failed" in refused(verified, "update_weights_from_tensor", serialized_named_tensors=tensors)
    assert verified.ask(**body)["output_ids"] == before["output_ids"]


def test_an_update_that_has_to_flush_the_cache_while_a_request_runs_is_refused_before_weights_change(verified, prompts, model):
    running = {"input_ids": prompts[0], "stream": True, **greedy(32)}
    *_, before = verified.stream("generate", running)
    chunks = verified.stream("generate", running)
    next(chunks)
    verified.request("pause_generation", {"mode": "in_place"})
    try:
        tensors = [pickled([(CHANGED, old_weights(model) * 1.5)])]
        told = refused(verified, "update_weights_from_tensor", serialized_named_tensors=tensors)
    finally:
        verified.request("continue_generation", {})
    assert "a request runs or waits" in told and "flush_cache false" in told
    *_, after = chunks
    assert after["output_ids"] == before["output_ids"]
