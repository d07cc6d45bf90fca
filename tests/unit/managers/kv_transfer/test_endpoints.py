"""Links listen where nobody else comes, and keys lie in files that nobody else reads."""

import pytest

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys, check_endpoint
from sglang_ext.managers.kv_transfer.wire import LinkError

KEYS = LinkKeys.generate()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:30123", "tcp://[::1]:30123"])
def test_loopback_needs_no_keys(endpoint):
    check_endpoint(endpoint, None)


def test_other_machines_need_keys():
    check_endpoint("tcp://10.1.2.3:30123", KEYS)
    with pytest.raises(LinkError, match="leaves this machine without keys"):
        check_endpoint("tcp://10.1.2.3:30123", None)


@pytest.mark.parametrize(
    "endpoint, why",
    [("tcp://*:30123", "not a name or"), ("tcp://0.0.0.0:30123", "all interfaces"), ("tcp://[::]:30123", "all interfaces"),
     ("tcp://host:1", "not a name"), ("tcp://127.0.0.1:*", "no endpoint"), ("tcp://127.0.0.1:99999", "no endpoint"),
     ("inproc://a", "no endpoint"), ("ipc://relative", "no endpoint"), ("udp://127.0.0.1:1", "no endpoint")],
)  # fmt: skip
def test_what_is_open_or_unknown_is_refused(endpoint, why):
    with pytest.raises(LinkError, match=why):
        check_endpoint(endpoint, KEYS)


def test_a_folder_of_sockets_is_this_users_alone(tmp_path):
    check_endpoint(f"ipc://{tmp_path}/new/link", None)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "new").chmod(0o750)
    with pytest.raises(LinkError, match="mode 750"):
        check_endpoint(f"ipc://{tmp_path}/new/link", None)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "mine")
    with pytest.raises(LinkError, match="chmod 700 it"):
        check_endpoint(f"ipc://{tmp_path}/elsewhere/link", None)
    with pytest.raises(LinkError, match="no folder"):
        check_endpoint(f"ipc://{tmp_path}/a/b/link", None)


def test_keys_are_written_once_and_read_by_their_owner(tmp_path):
    file = tmp_path / "keys"
    KEYS.write(file)
    assert file.stat().st_mode & 0o777 == 0o600 and LinkKeys.read(file) == KEYS
    with pytest.raises(FileExistsError):
        KEYS.write(file)
    file.chmod(0o640)
    with pytest.raises(LinkError, match="mode 640; give it mode 600"):
        LinkKeys.read(file)


@pytest.mark.parametrize(
    "content", [b"", b"a b", KEYS.public, KEYS.public + b" " + LinkKeys.generate().secret, b"\xff" * 40 + b" " + b"\x00" * 40],
    ids=["nothing", "too short", "one", "of two pairs", "no text"],
)
def test_a_file_without_a_pair_is_refused(tmp_path, content):
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(LinkError, match="no pair"):
        LinkKeys.read(file)
    with pytest.raises(LinkError, match="no keys of links"):
        LinkKeys.read(tmp_path / "missing")
