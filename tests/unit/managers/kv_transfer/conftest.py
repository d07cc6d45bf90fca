"""Servers and links that are closed after each test."""

import pytest
from link_helpers import QUICK, SETTINGS, RawSender

from sglang_ext.managers.kv_transfer.limits import NetworkInterface
from sglang_ext.managers.kv_transfer.link import Link
from sglang_ext.managers.kv_transfer.link_server import LinkServer


class Ends:
    """Makes both ends, and closes them."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def server(self, endpoint="tcp://127.0.0.1:0", limits=QUICK, keys=None, settings=SETTINGS, **others):
        self.made.append(made := LinkServer(endpoint, settings, limits, keys, **others))
        return made

    def link(self, endpoint, limits=QUICK, gbps=None, keys=None, settings=SETTINGS, **others):
        others.setdefault("interface", NetworkInterface(gbps))
        self.made.append(made := Link(endpoint, settings, limits, keys=keys, **others))
        return made

    def raw(self, endpoint, *arguments):
        self.made.append(made := RawSender(endpoint, *arguments))
        return made

    def close(self):
        for made in reversed(self.made):
            made.close()


@pytest.fixture
def ends(tmp_path):
    made = Ends(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request, tmp_path):
    """One on each transport."""
    return f"ipc://{tmp_path}/link/rank0" if request.param == "ipc" else "tcp://127.0.0.1:0"
