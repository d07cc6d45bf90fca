"""A starting server deletes the socket files of killed servers, and keeps those of running and starting servers."""

import multiprocessing
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from link_helpers import QUICK, SETTINGS, Listener, Sink, expected, part, shape
from waiting import until

from sglang_ext.managers.kv_transfer import endpoints
from sglang_ext.managers.kv_transfer.link_server import LinkServer
from sglang_ext.managers.kv_transfer.wire import LinkError, Stream

OF = shape(1, residual=False, aux=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sockets").mkdir(mode=0o700)
    return tmp_path / "sockets"


def endpoint(folder, number):
    return f"ipc://{folder}/kv-link-{number}-0"


def sockets(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != endpoints.LOCK)


def bound(file):
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(file))
    return made


def answers(ends, server):
    """Whether a room arrives there."""
    server.rooms.register(1, expected(OF), Sink())
    link, listener = ends.link(server.endpoint), Listener()
    link.open(1, OF, listener)
    link.offer(1, *part(Stream.ANCHOR, b"whole"))
    until(lambda: listener.reasons)
    return listener.reasons == {1: None}


def serve(pipe, at):
    LinkServer(at, SETTINGS, QUICK)
    pipe.send("ready")
    signal.pause()


def test_the_file_of_a_killed_server_goes_when_the_next_starts(ends, folder):
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(there, endpoint(folder, 1)))
    process.start()
    assert here.poll(20) and here.recv() == "ready"
    living = ends.server(endpoint(folder, 2))
    assert sockets(folder) == ["kv-link-1-0", "kv-link-2-0"]
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert sockets(folder) == ["kv-link-1-0", "kv-link-2-0"]
    third = ends.server(endpoint(folder, 3))
    assert sockets(folder) == ["kv-link-2-0", "kv-link-3-0"]
    assert answers(ends, living) and answers(ends, third)


def test_what_is_no_dead_socket_of_ours_stays(ends, folder):
    bound(folder / "kv-link-1-0").close()
    bound(folder / "others").close()
    (folder / "kv-link-notes").write_text("no socket")
    # It takes nobody: a connection to it would have to wait.
    with bound(folder / "kv-link-2-0") as busy:
        busy.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(str(folder / "kv-link-2-0"))
        ends.server(endpoint(folder, 3))
        assert sockets(folder) == ["kv-link-2-0", "kv-link-3-0", "kv-link-notes", "others"]
        for each in waiting:
            each.close()


def test_a_server_that_has_bound_and_does_not_listen_yet_is_waited_for(ends, folder):
    with ThreadPoolExecutor(1) as pool:
        with endpoints.lock_socket_folder(endpoint(folder, 1)):
            starting = bound(folder / "kv-link-1-0")
            next_one = pool.submit(ends.server, endpoint(folder, 2))
            with pytest.raises(TimeoutError):
                next_one.result(0.3)
            assert sockets(folder) == ["kv-link-1-0"]
            starting.listen()
        next_one.result(10)
    assert sockets(folder) == ["kv-link-1-0", "kv-link-2-0"]
    starting.close()


def test_servers_that_start_at_once_all_answer(ends, folder):
    for number in range(20):
        bound(folder / f"kv-link-{number}-9").close()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: ends.server(endpoint(folder, number)), range(8)))
    assert sockets(folder) == [f"kv-link-{number}-0" for number in range(8)]
    assert all(answers(ends, server) for server in made)


def test_a_folder_that_stays_locked_is_named(folder, monkeypatch):
    monkeypatch.setattr(endpoints, "LOCKED_SECONDS", 0.1)
    with endpoints.lock_socket_folder(endpoint(folder, 1)), pytest.raises(LinkError, match="binding.lock is locked for 0.1 s by a server"):
        LinkServer(endpoint(folder, 2), SETTINGS)
    assert sockets(folder) == []


def test_nothing_is_removed_where_links_listen_on_tcp(ends, folder, monkeypatch):
    bound(folder / "kv-link-1-0").close()
    monkeypatch.chdir(folder)
    ends.server("tcp://127.0.0.1:0")
    assert sockets(folder) == ["kv-link-1-0"] and not Path(endpoints.LOCK).exists()
