"""What the log says of a request: a JSON line on standard error, without what was asked or answered."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.requests import Request

from divdec.serving.api.errors import ApiError

LONGEST_PATH = 200


@dataclasses.dataclass
class RequestRecord:
    """Filled in while a request is answered."""

    id: str
    method: str
    path: str
    started: float = dataclasses.field(default_factory=time.perf_counter)
    status: int = 0
    endpoint: str = "other"
    model: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finish_reasons: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None
    """The error's code; where the program itself failed, the exception's kind."""
    prompt: Any = None
    """What was asked, where the operator wants it in the log."""

    def failed(self, told: ApiError, error: BaseException) -> None:
        """Remember an error: by what the client was told, and where that says nothing by its kind."""
        self.error = type(error).__name__ if told.code == "internal_error" else told.code or str(told.status)

    @property
    def seconds(self) -> float:
        """Since the request began."""
        return time.perf_counter() - self.started

    def line(self) -> dict[str, Any]:
        """What is written."""
        found = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "method": self.method,
            "path": self.path[:LONGEST_PATH],
            "status": self.status,
            "seconds": round(self.seconds, 4),
        }
        if self.model is not None:
            found |= {
                "model": self.model,
                "stream": self.stream,
                "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.generated_tokens,
                "finish_reason": ",".join(sorted(set(self.finish_reasons))) or None,
            }
        if self.error is not None:
            found["error"] = self.error
        if self.prompt is not None:
            found["prompt"] = self.prompt
        return found


class Log:
    """Writes JSON lines."""

    def __init__(self, stream: TextIO | None = None, *, prompts: bool = False) -> None:
        """Where to write, and whether prompts are written too.

        Args:
            stream: standard error by default.
            prompts: write what was asked.
        """
        self.stream = stream or sys.stderr
        self.prompts = prompts

    def write(self, content: dict[str, Any]) -> None:
        """Write one line; a log that cannot be written ends no request."""
        try:
            print(json.dumps(content), file=self.stream, flush=True)
        except (OSError, ValueError):
            return

    def event(self, name: str, **content: Any) -> None:
        """Something that is no request."""
        self.write({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": name, **content})


def record_of(request: Request) -> RequestRecord:
    """The record of the request that is being answered."""
    return request.state.record
