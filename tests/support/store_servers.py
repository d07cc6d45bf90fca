"""Store servers of this machine, and small disks."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

AWS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
"""Environment variables of all processes that use :func:`s3_url`."""


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def running(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server of this machine, which listens on ``port``."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, f"{command} ended"
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis server without snapshots. Skips the test if Redis or its client is not installed."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    with running(program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), port=port) as process:
        yield process


@contextmanager
def file_url(folder: Path) -> Iterator[str]:
    """URL of a store in a new folder."""
    yield f"file:{folder}/store"


@contextmanager
def s3_url(folder: Path) -> Iterator[str]:
    """URL of a store in a bucket of a new S3 server of moto. Skips the test if it or its client is not installed."""
    boto3, port = pytest.importorskip("boto3"), free_port()
    pytest.importorskip("moto.server")
    with running(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port), pytest.MonkeyPatch.context() as patch:
        for key, value in AWS.items():
            patch.setenv(key, value)
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="prefixes")
        yield f"s3://prefixes/a/b?endpoint=http://127.0.0.1:{port}"


MEMORY_OF_A_HOST = """
import sys, time
from mooncake.store import MooncakeDistributedStore
host = MooncakeDistributedStore()
assert host.setup("127.0.0.1", "P2PHANDSHAKE", 128 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def mooncake_url(folder: Path) -> Iterator[str]:
    """URL of a Mooncake store with 128 MB. Skips the test if Mooncake is not installed."""
    try:
        import mooncake.store
    except ImportError as error:
        pytest.skip(f"Mooncake is not installed: {error}")
    master, port = Path(mooncake.store.__file__).with_name("mooncake_master"), free_port()
    with running(str(master), "--rpc_port", str(port), "--metrics_port", str(free_port()), port=port):
        host = subprocess.Popen([sys.executable, "-c", MEMORY_OF_A_HOST, f"127.0.0.1:{port}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert host.stdout.readline() == b"ready\n"
            yield f"mooncake://127.0.0.1:{port}"
        finally:
            host.kill()
            host.wait()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes. Skips the test if this user may not mount it."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this user cannot mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
