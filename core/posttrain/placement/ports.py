"""Who listens on a port of this machine, and whether it is a Ray cluster: asked before one of ours starts there.

    check_free({6379: "--ray-port"})          # raises ConfigError with the process that holds it, and what to do
    holder(6379)                              # Holder(port=6379, pid=412, command="gcs_server …", speaks="Ray 2.60.0"), or None

Two jobs on one node collide silently otherwise: the second finds the first one's control store and joins it. Nothing here
imports Ray: its control store is recognised by one gRPC request, sent without credentials, written out as HTTP/2 frames.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import ConfigError

RAY_PORT = 6379
"""The port of Ray's control store (GCS) unless `--ray-port` says otherwise; Ray's own default."""

_CHECK_ALIVE = b"/ray.rpc.NodeInfoGcsService/CheckAlive"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _RESET, _GOAWAY = 0, 1, 4, 3, 7
_END_STREAM, _END_HEADERS = 1, 4


@dataclass(frozen=True, slots=True)
class Holder:
    """A listener. `pid` and `command` are known for processes that this user may look at; `speaks` is "" unless it is Ray."""

    port: int
    pid: int | None = None
    command: str = ""
    speaks: str = ""

    def __str__(self) -> str:
        """One line for a person."""
        who = f"process {self.pid} ({self.command[:80]})" if self.pid else "a process of another user or container"
        return f"{who}, a cluster of {self.speaks}" if self.speaks else who


def holder(port: int, host: str = "127.0.0.1", *, timeout: float = 2.0) -> Holder | None:
    """Who listens on `port` here; None when it can be had. timeout: seconds for an answer of what listens."""
    inodes = listening().get(port, set())
    if not inodes and not _answers(host, port, timeout):
        return None
    pid = _owner(inodes)
    return Holder(port, pid, _command(pid) if pid else "", ray_version(host, port, timeout=timeout) or "")


def check_free(ports: Mapping[int, str]) -> None:
    """Raise ConfigError for the first port that is taken. ports: number -> the flag or key that chose it."""
    for port, chosen_by in ports.items():
        if found := holder(port):
            raise occupied(found, chosen_by)


def occupied(found: Holder, chosen_by: str) -> ConfigError:
    """The error of a port that somebody else listens on."""
    ray = bool(found.speaks)
    join = f"; to join that cluster instead: RAY_ADDRESS=HOST:{found.port}" if ray else ""
    return ConfigError(
        f"port {found.port} is taken by {found}",
        cause="another job runs its Ray cluster on this node; both would share it and contend for the devices"
        if ray
        else "only one process can listen on a port",
        fix=f"give this job another {chosen_by} and other nodes or devices, or run the jobs one after the other{join}",
        where=chosen_by,
        anchor="troubleshooting.md#two-jobs-on-one-node-collide",
        code="port_taken",
    )


def wait_for_ray(host: str, port: int, timeout: float) -> bool:
    """Whether a Ray control store answers within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if ray_version(host, port, timeout=1.0):
            return True
        time.sleep(0.1)
    return False


def ray_version(host: str, port: int, *, timeout: float = 2.0) -> str | None:
    """What Ray answers there: "Ray 2.60.0", or "Ray" when it wants a token; None when it is not Ray or nothing."""
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.sendall(_request(_CHECK_ALIVE))
            return told(_frames(connection, timeout))
    except OSError:
        return None


def told(frames: Iterator[tuple[int, bytes]]) -> str | None:
    """Pure: the answer to CheckAlive, from (kind, payload) of its frames."""
    for kind, payload in frames:
        if kind == _DATA and (version := re.search(rb"\d+\.\d+\.\d+[\w.]*", payload)):
            return f"Ray {version[0].decode()}"
        if kind == _HEADERS and b"InvalidAuthToken" in payload:
            return "Ray"
        if kind in (_RESET, _GOAWAY):
            return None
    return None


def _request(path: bytes) -> bytes:
    """A gRPC call with an empty message, on stream 1; headers literally, without indexing and without Huffman codes."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost",
        b"content-type": b"application/grpc", b"te": b"trailers",
    }  # fmt: skip
    headers = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
    return b"".join((
        _PREFACE,
        _frame(_SETTINGS, 0, 0, b""),
        _frame(_HEADERS, _END_HEADERS, 1, headers),
        _frame(_DATA, _END_STREAM, 1, b"\0" * 5),
    ))  # fmt: skip


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + payload


def _frames(connection: socket.socket, timeout: float) -> Iterator[tuple[int, bytes]]:
    """(kind, payload) of the frames that arrive, until the answer's end or the deadline."""
    deadline, buffer = time.monotonic() + timeout, b""
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        received = connection.recv(65536)
        if not received:
            return
        buffer += received
        while len(buffer) >= 9 and len(buffer) >= 9 + (size := int.from_bytes(buffer[:3], "big")):
            kind, flags, stream = buffer[3], buffer[4], int.from_bytes(buffer[5:9], "big")
            yield kind, buffer[9 : 9 + size]
            buffer = buffer[9 + size :]
            if stream == 1 and flags & _END_STREAM:
                return


def listening() -> dict[int, set[str]]:
    """Ports in state LISTEN of this network namespace -> inodes of their sockets; empty where /proc is absent."""
    found: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found.setdefault(int(fields[1].rsplit(":", 1)[1], 16), set()).add(fields[9])
    return found


def _answers(host: str, port: int, timeout: float) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout):
        return True
    return False


def _owner(inodes: set[str]) -> int | None:
    """The process that holds one of these sockets, as far as this user may see."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir() if wanted else ():
        if process.name.isdigit():
            with suppress(OSError):
                for fd in os.scandir(process / "fd"):
                    with suppress(OSError):
                        if os.readlink(fd.path) in wanted:
                            return int(process.name)
    return None


def _command(pid: int) -> str:
    from posttrain.config.secrets import conceal_text

    with suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        program, _, rest = text.partition(" ")
        return conceal_text(f"{Path(program).name} {rest}".strip())
    return ""
