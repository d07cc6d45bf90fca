"""What a cache rank and its server refuse, and why: requests that go beyond the shape, memory that is missing, GPUs that cannot."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from device_rank_helpers import rank_here
from rank_helpers import attach
from rank_socket import RankSocket, serve
from sglang.srt.distributed.device_communicators import cuda_wrapper

from sglang_ext.core import OptionError
from sglang_ext.managers.cache_rank import protocol
from sglang_ext.managers.cache_rank.exchange_buffer import ExchangeBuffer, ExchangeBufferError, check_peer_access
from sglang_ext.managers.cache_rank.feature import fit_shape, warn_if_few_lanes
from sglang_ext.managers.cache_rank.mapped_exchange_buffer import int32_words
from sglang_ext.managers.cache_rank.protocol import ExchangeLayout
from sglang_ext.managers.cache_rank.selection_server import SelectionServer
from sglang_ext.managers.kv_transfer.wire import WireError


def test_a_rank_ends_where_it_is_asked_for_what_cannot_be():
    shape = attach().shape
    rank, socket = rank_here(ExchangeBuffer(shape, torch.device("cpu"), "cpu"))
    for wrong in (
        protocol.SelectionRequest(0, 0, 3, 1, 64, 8, (63,)), protocol.SelectionRequest(4, 0, 5, 1, 64, 8, (63,)),
        protocol.SelectionRequest(0, 0, 5, 1, 4, 8, (63,)),
        protocol.Append((protocol.KeyPiece(0, 0, 64, 0), protocol.KeyPiece(0, 0, 64, 8))),
    ):  # fmt: skip
        with pytest.raises(WireError, match="goes beyond|place 8 was named, of 8"):
            socket.tell(wrong)
            serve(rank)


NO_ROOM = "its GPU has no room for keys of 2048 tokens: pass a smaller --kv-cache-rank-gb, or select another GPU with --kv-cache-rank-gpu"


def fails(error):
    """What raises this error, whatever it is given."""

    def fail(*given, **named):
        raise error

    return fail


def refusal(bits=16):
    """Why a rank that would be on a GPU refuses."""
    socket = RankSocket()
    socket.tell(attach(bits=bits))
    with pytest.raises(WireError):
        serve(SelectionServer(socket, None, 1, torch.device("cpu")))
    assert isinstance(socket.messages[-1], protocol.AttachRefused)
    return socket.messages[-1].reason


@pytest.fixture
def cuda(monkeypatch):
    """SGLang's calls of CUDA, in the place of a GPU: they map any memory."""
    mapped = SimpleNamespace(cudaIpcOpenMemHandle=lambda handle: SimpleNamespace(value=4096))
    monkeypatch.setattr(cuda_wrapper, "CudaRTLibrary", lambda: mapped)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return mapped


def test_a_rank_that_cannot_map_the_arena_says_why(cuda):
    cuda.cudaIpcOpenMemHandle = fails(RuntimeError("no peer access"))
    said = refusal()
    assert said.startswith("memory of the inference rank cannot be mapped on cpu: no peer access; both processes need one user")


def test_a_rank_that_cannot_hold_the_keys_says_why(monkeypatch):
    monkeypatch.setattr(torch, "empty", fails(torch.OutOfMemoryError("none left")))
    assert refusal() == f"{NO_ROOM} (none left)"


def test_a_rank_whose_gpu_has_no_kernels_that_choose_says_why(cuda, monkeypatch):
    monkeypatch.setattr(SelectionServer, "_warm_up_lengths", fails(OptionError("no products of integers: pass --kv-score-bits 16")))
    assert refusal(bits=8) == "its GPU cannot select tokens: no products of integers: pass --kv-score-bits 16"


def test_gpus_without_peer_access_are_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) == (1, 0))
    check_peer_access(torch.device("cuda:0"), torch.device("cuda:0"))
    check_peer_access(torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ExchangeBufferError, match="GPU 2 cannot read the memory of GPU 0, .*, or pass --kv-cache-ranks 0"):
        check_peer_access(torch.device("cuda:0"), torch.device("cuda:2"))


def test_an_arena_has_as_many_lanes_as_its_bytes_hold():
    shape = attach().shape
    small = ExchangeLayout(shape).size
    assert fit_shape(shape, small) == shape
    many = fit_shape(type(shape)(*[getattr(shape, name) if name != "lanes" else 4096 for name in shape.__struct_fields__]), 64 << 20)
    assert 1 < many.lanes < 4096 and ExchangeLayout(many).size <= 64 << 20
    assert fit_shape(shape, 1).lanes == 1
    with pytest.raises(ValueError, match="a row of 6 bytes"):
        int32_words(6)


def test_fewer_lanes_than_requests_are_told_with_a_remedy(caplog):
    warn_if_few_lanes(4, 4)
    assert not caplog.records
    warn_if_few_lanes(2 * 2, 5)
    (said,) = caplog.records
    assert said.levelname == "WARNING" and "for 4 of up to 5 concurrent requests" in said.message
    assert "pass --max-running-requests 4, or for more a lower --kv-select" in said.message
