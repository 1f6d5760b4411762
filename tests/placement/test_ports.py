"""Who holds a port, and whether it is Ray: real sockets, frames as Ray sends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from posttrain.errors import ConfigError
from posttrain.placement import ports
from posttrain.placement.ports import Holder, check_free, holder, occupied, ray_version, told

AUTH = b"\x88@\x0ccontent-type\x10application/grpc\x00\x0bgrpc-status\x0216\x00\x0cgrpc-message\x3eInvalidAuthToken: no"
ALIVE = b"\0\0\0\0\x0a\n\x00\x12\x062.60.0\x1a\x00"
"""As captured from a control store with and without token authentication."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def serve(server: socket.socket, answer: bytes) -> threading.Thread:
    def run() -> None:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(2)
            while b"CheckAlive" not in connection.recv(65536):
                pass
            connection.sendall(answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def frames(*parts: tuple[int, int, int, bytes]) -> bytes:
    return b"".join(ports._frame(*part) for part in parts)


def test_a_free_port_has_no_holder(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert holder(port) is None
    check_free({port: "--ray-port"})


def test_a_listener_is_named_with_its_process(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    found = holder(port, timeout=0.1)
    assert found is not None and found.pid == os.getpid() and found.speaks == ""
    assert found.command.split() == " ".join(psutil.Process().cmdline()).split()
    with pytest.raises(ConfigError, match=rf"port {port} is taken by process {os.getpid()}") as caught:
        check_free({port: "--ray-port"})
    assert caught.value.code == "port_taken" and "--ray-port" in caught.value.fix and "RAY_ADDRESS" not in caught.value.fix


def test_the_listener_of_another_process_is_named() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        found = holder(int(child.stdout.readline()), timeout=0.1)
        child.stdin.write("\n")
        child.stdin.flush()
    assert found is not None and found.pid == child.pid


@pytest.mark.parametrize(
    ("answer", "speaks"),
    [
        (frames((4, 0, 0, b""), (1, 4, 1, b""), (0, 0, 1, ALIVE), (1, 5, 1, b"")), "Ray 2.60.0"),
        (frames((4, 0, 0, b""), (1, 5, 1, AUTH)), "Ray"),
        (frames((4, 0, 0, b""), (1, 5, 1, b"\x88\x00\x0bgrpc-status\x0212")), None),
        (frames((4, 0, 0, b""), (7, 0, 0, b"\0" * 8)), None),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", None),
    ],
    ids=["ray", "ray with tokens", "another gRPC server", "refused", "a web server"],
)
def test_ray_is_recognised_by_what_it_answers(listener: socket.socket, answer: bytes, speaks: str | None) -> None:
    thread = serve(listener, answer)
    assert ray_version("127.0.0.1", listener.getsockname()[1], timeout=2) == speaks
    thread.join(2)


def test_a_silent_listener_costs_no_more_than_the_timeout(listener: socket.socket) -> None:
    assert ray_version("127.0.0.1", listener.getsockname()[1], timeout=0.1) is None


def test_a_version_is_read_and_nothing_else_is_taken_for_one() -> None:
    assert told(iter([(0, ALIVE)])) == "Ray 2.60.0"
    assert told(iter([(0, b"ok")])) is None and told(iter([])) is None


def test_a_foreign_cluster_is_said_with_both_ways_out() -> None:
    error = occupied(Holder(6379, 41, "gcs_server --port", "Ray 2.60.0"), "--ray-port")
    text = str(error)
    assert "a cluster of Ray 2.60.0" in text and "another --ray-port" in text and "RAY_ADDRESS=HOST:6379" in text
    assert "another user or container" in str(occupied(Holder(6379), "--ray-port"))
