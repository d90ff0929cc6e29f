"""`Channel`: messages between the engine and a process that fills masks, in few system calls."""

from __future__ import annotations

import socket
import struct

# what became of an answer's token: see `mask_worker`
REJECTED, ACCEPTED, COMPLETE, FAILED = range(4)
_PIECE = 1 << 16  # bytes of a message that one packet carries
_MORE = b"+"  # first byte of a packet that others of its message follow
_LAST = b"."


class Channel:
    """One end. Messages keep their bounds. Raises `OSError` if the other end has ended."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def limit(self, seconds: float) -> None:
        """Let calls from here on raise `BlockingIOError` if the other end lets them wait for so
        long."""
        # the kernel's timeouts: those of Python's sockets take a system call more
        most = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return both ends, for `Channel` here and `of` in another process."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @classmethod
    def of(cls, number: int) -> Channel:
        """Return the end with that file descriptor."""
        return cls(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=number))

    def send(self, message: bytes) -> None:
        while len(message) > _PIECE:
            self._end.send(_MORE + message[:_PIECE])
            message = message[_PIECE:]
        self._end.send(_LAST + message)

    def receive(self) -> bytes:
        """Wait for a message."""
        packet = self._packet()
        if packet.startswith(_LAST):
            return packet[1:]
        pieces = [packet[1:]]
        while packet.startswith(_MORE):
            packet = self._packet()
            pieces.append(packet[1:])
        return b"".join(pieces)

    def has_message(self) -> bool:
        """True if `receive` needn't wait."""
        try:
            self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # which `receive` raises
            return True
        return True

    def close(self) -> None:
        """Idempotent. Later calls raise `OSError`."""
        self._end.close()

    def _packet(self) -> bytes:
        packet = self._end.recv(_PIECE + 1)
        if not packet:
            raise ConnectionResetError("the other end has ended")
        return packet
