"""Messages of known length over a stream socket."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("<Q")


def send(channel: socket.socket, payload: bytes) -> None:
    channel.sendall(HEADER.pack(len(payload)) + payload)


def receive(channel: socket.socket) -> bytes:
    """One message. Raises EOFError when the other end is gone, TimeoutError past the socket's time limit."""
    (size,) = HEADER.unpack(_exactly(channel, HEADER.size))
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except ConnectionError:
            raise EOFError("the other end is gone") from None
        if not part:
            raise EOFError("the other end is gone")
        parts += part
    return bytes(parts)
