"""Endpoints that links may listen on, cleanup of sockets that killed servers left, and the keys of links between machines."""

import ipaddress
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket

import zmq
from filelock import FileLock, Timeout
from zmq.utils import z85

from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.wire import LinkError

# Constants of libzmq's authentication protocol (ZeroMQ RFC 27).
ZAP_ENDPOINT, ZAP_VERSION, ZAP_DOMAIN = "inproc://zeromq.zap.01", b"1.0", b"kv-link"
# Prefix of our socket files, the lock file of their folder, and the timeout of that lock in seconds.
SOCKETS, LOCK, LOCKED_SECONDS = "kv-link-", "binding.lock", 30.0
# Maximum of messages that libzmq queues to one peer, or from one.
MOST_WAITING = 4096


@dataclass(frozen=True)
class LinkKeys:
    """A CURVE key pair, in Z85, that both ends of all links of a deployment share. It authenticates senders and receivers."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "LinkKeys":
        """Generate a new pair."""
        return cls(*zmq.curve_keypair())

    def write(self, file: Path) -> None:
        """Write the pair to a new file that only its owner can read.

        Raises:
            FileExistsError: The file exists.
        """
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(self.public + b"\n" + self.secret + b"\n")

    @classmethod
    def read(cls, file: Path) -> "LinkKeys":
        """Read a file that :meth:`write` wrote.

        Raises:
            LinkError: Other users can read it, or it holds no matching pair.
        """
        remedy = "create one with python -m sglang_ext.link_keys FILE, and copy it to the other machines"
        try:
            mode, words = file.stat().st_mode, file.read_bytes().split()
        except OSError as error:
            raise LinkError(f"no keys of links in {file}: {error}; {remedy}") from error
        if mode & 0o077:
            raise LinkError(f"{file} holds the secret key of links and has mode {stat.S_IMODE(mode):o}; give it mode 600")
        try:
            fits = len(words) == 2 and zmq.curve_public(words[1]) == words[0]
        except (ValueError, zmq.ZMQError):
            fits = False
        if not fits:
            raise LinkError(f"{file} holds no pair of a public and a secret key; {remedy}")
        return cls(*words)

    def answer_zap(self, socket: zmq.Socket) -> str | None:
        """Answer one request of libzmq on a REP socket bound to ``ZAP_ENDPOINT``. Return the address of a refused peer, else None."""
        _, request, domain, address, _, mechanism, *credentials = socket.recv_multipart()
        known = domain == ZAP_DOMAIN and mechanism == b"CURVE" and [z85.encode(key) for key in credentials] == [self.public]
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        socket.send_multipart([ZAP_VERSION, request, status, text, b"kv-link", b""])
        return None if known else address.decode(errors="replace")


def check_endpoint(endpoint: str, keys: LinkKeys | None) -> None:
    """Refuse endpoints that other users or machines can access without keys. Raise :class:`LinkError` with what to pass instead.

    ``ipc://`` must name a file in a folder that only this user can enter. ``tcp://`` must name an address and a port; another machine's
    access needs keys.
    """
    transport, _, place = endpoint.partition("://")
    if transport == "ipc" and place.startswith("/"):
        _check_folder(Path(place).parent)
        return
    host, _, port = place.rpartition(":")
    if transport != "tcp" or not port.isdigit() or int(port) > 65535:
        raise LinkError(f"{endpoint!r} is no endpoint of a link: pass ipc:///FOLDER/FILE or tcp://ADDRESS:PORT (port 0: any free one)")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise LinkError(f"{endpoint!r}: pass the address of one interface, such as 127.0.0.1, not a name or *") from error
    if address.is_unspecified:
        raise LinkError(f"{endpoint!r} listens on all interfaces; pass the address of one")
    if keys is None and not address.is_loopback:
        raise LinkError(f"{endpoint!r} leaves this machine without keys; give both servers the same key file, or stay on loopback")


def listen(
    context: zmq.Context, endpoint: str, keys: LinkKeys | None, most_waiting: int = MOST_WAITING
) -> tuple[zmq.Socket, zmq.Socket | None]:
    """Return a bound socket for messages from and to senders, and with keys the socket on which libzmq asks who may connect.

    libzmq queues at most ``most_waiting`` messages to one peer, or from one. Port 0 takes a free port. If the endpoint is in use,
    ``context`` is destroyed and :class:`LinkError` is raised.
    """
    zap = None
    socket = context.socket(zmq.ROUTER)
    # A message is only started if it can be completed. Peers that do not read are dropped.
    socket.router_mandatory = True
    socket.set_hwm(most_waiting)
    socket.linger, socket.maxmsgsize = 0, wire.MAX_MESSAGE_BYTES
    socket.ipv6 = "[" in endpoint
    try:
        if keys is not None:
            zap = context.socket(zmq.REP)
            zap.linger = 0
            zap.bind(ZAP_ENDPOINT)
            socket.curve_server, socket.zap_domain = True, ZAP_DOMAIN
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        with lock_socket_folder(endpoint):
            # Only the port is a wildcard, never the host: libzmq writes port 0 as *.
            socket.bind(f"{endpoint[:-2]}:*" if endpoint.startswith("tcp") and endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        context.destroy(0)
        raise LinkError(f"no link can listen on {endpoint}: {error}; name a free port or file, and an address of this machine") from error
    return socket, zap


@contextmanager
def lock_socket_folder(endpoint: str) -> Iterator[None]:
    """Lock the folder while a server binds its socket. First remove the socket files that no server listens on.

    A killed server leaves its file. Between its bind and its listen, a running server looks the same, so servers bind one at a time. If
    another server holds the lock for too long, :class:`LinkError` is raised.
    """
    transport, _, place = endpoint.partition("://")
    if transport != "ipc":
        yield
        return
    lock = FileLock(Path(place).parent / LOCK, timeout=LOCKED_SECONDS)
    try:
        with lock:
            for file in Path(place).parent.glob(f"{SOCKETS}*"):
                if file.is_socket() and _is_stale(file):
                    file.unlink(missing_ok=True)
            yield
    except Timeout as error:
        why = f"{lock.lock_file} is locked for {LOCKED_SECONDS:g} s by a server that starts"
        raise LinkError(f"{why}: stop that server, and start again") from error


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        raise LinkError(f"no folder {folder} for sockets: {error}; name one that can be created") from error
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise LinkError(
            f"{folder} has mode {stat.S_IMODE(state.st_mode):o} and owner {state.st_uid}; sockets must be in a folder of user "
            f"{os.getuid()} with mode 700: chmod 700 it, or set TMPDIR to another folder"
        )


def _is_stale(file: Path) -> bool:
    """Return whether no server listens on a socket file."""
    # The process id in the name is not used: in another container that shares the folder, it is another process's id.
    with Socket(AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(file))
        except ConnectionRefusedError:
            return True
        except OSError:
            # Its listener is busy, or the file is already gone.
            return False
    return False
