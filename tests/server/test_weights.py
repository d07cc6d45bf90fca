"""New weights: nothing computed with the old ones stays, and answers are stock's with the new ones."""

import base64
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from servers import Server, greedy

pytestmark = pytest.mark.server

CHANGED = "model.layers.3.input_layernorm.weight"


def update(server: Server, weights: torch.Tensor) -> None:
    """Put ``weights`` in the place of :data:`CHANGED`, over HTTP."""
    settle(server)
    payload = base64.b64encode(pickle.dumps([(CHANGED, weights)])).decode()
    answer = server.request("update_weights_from_tensor", {"serialized_named_tensors": [payload]})
    assert answer["success"], answer


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
