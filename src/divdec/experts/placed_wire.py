"""Messages between processes: facts as JSON and tensors, over torch.distributed, each wait with an end.

It knows nothing of experts. A message is what safetensors writes, so that nothing that is read can run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import struct
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from divdec.errors import FailedClosed, first_line

FIRST = 1 << 12  # bytes of the first piece, which tells the length; most messages of a decoding step fit into it
_LENGTH = struct.Struct("<Q")
_FACTS = "facts"


@dataclasses.dataclass(frozen=True)
class Message:
    """What one process tells another."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def encoded(self) -> bytearray:
        """The message as bytes."""
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in self.tensors.items()}
        return bytearray(save(tensors, metadata={_FACTS: json.dumps(self.facts)}))

    @classmethod
    def decoded(cls, body: bytes) -> Message:
        """The inverse of `encoded`."""
        (length,) = _LENGTH.unpack_from(body)
        header = json.loads(body[_LENGTH.size : _LENGTH.size + length])
        return cls(json.loads(header["__metadata__"][_FACTS]), load(body))


class Link:
    """Messages to and from one other process, which come in the order in which they were sent.

    Args:
        peer: the other process's rank.
        name: what messages call it.
        group: a gloo group that never gives up waiting by itself.
        fast: a group with NCCL for tensors that lie on CUDA devices at both ends; None lets them go by the host.
    """

    def __init__(
        self, peer: int, name: str, group: dist.ProcessGroup | None = None, fast: dist.ProcessGroup | None = None
    ) -> None:
        self.peer, self.name = peer, name
        self.received = 0
        """Bytes that have come, what goes by NCCL included."""
        self._group, self._fast = group, fast

    def send(self, message: Message, timeout: float | None = None) -> None:
        """Hand a message over.

        Args:
            message: facts and tensors.
            timeout: seconds until the other process must have begun to read; None waits as long as it lives.

        Raises:
            FailedClosed: it is gone, or has not read.
        """
        direct = {name: tensor for name, tensor in message.tensors.items() if self._fast is not None and tensor.is_cuda}
        rest = {name: tensor for name, tensor in message.tensors.items() if name not in direct}
        about = {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in direct.items()}
        body = Message(message.facts | ({"direct": about} if about else {}), rest).encoded()
        with undisturbed():
            self._send(body, direct, timeout)

    def _send(self, body: bytearray, direct: Mapping[str, Tensor], timeout: float | None) -> None:
        first = bytearray(FIRST)
        _LENGTH.pack_into(first, 0, len(body))
        room = FIRST - _LENGTH.size
        first[_LENGTH.size : _LENGTH.size + min(room, len(body))] = body[:room]
        self._move(dist.isend, _bytes(first), timeout)
        if len(body) > room:
            self._move(dist.isend, _bytes(body[room:]), timeout)
        for tensor in direct.values():
            dist.send(tensor.contiguous(), self.peer, group=self._fast)

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for the next message.

        Args:
            timeout: seconds; None waits as long as the other process lives.

        Raises:
            FailedClosed: it is gone, or nothing came in time.
        """
        with undisturbed():
            return self._receive(timeout)

    def _receive(self, timeout: float | None) -> Message:
        first = torch.empty(FIRST, dtype=torch.uint8)
        self._move(dist.irecv, first, timeout)
        head = first.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(head)
        body, room = head[_LENGTH.size : _LENGTH.size + length], FIRST - _LENGTH.size
        if length > room:
            rest = torch.empty(length - room, dtype=torch.uint8)
            self._move(dist.irecv, rest, timeout)
            body += rest.numpy().tobytes()
        self.received += length
        message = Message.decoded(body)
        for name, (dtype, *shape) in message.facts.pop("direct", {}).items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            dist.recv(tensor, self.peer, group=self._fast)
            self.received += tensor.nbytes
            message.tensors[name] = tensor
        return message

    def _move(self, what: Any, piece: Tensor, timeout: float | None) -> None:
        try:
            work = what(piece, self.peer, group=self._group)
            work.wait() if timeout is None else work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            reason = f"did not answer within {timeout:g} seconds" if late and timeout else f"is gone ({_short(error)})"
            raise FailedClosed(f"{self.name} {reason}") from None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait until a message is whole: the rest of one would be taken for the next.

    Gloo's waits do not hear it anyhow.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    heard: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *what: heard.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if heard:
            usual(*heard[0])


def _bytes(content: bytearray) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)


def _short(error: Exception) -> str:
    """Gloo's message without the place in its source and its advice."""
    return first_line(error).partition("] ")[2].partition(". ")[0] or first_line(error)
