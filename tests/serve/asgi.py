"""Asks an ASGI application without a network: a client that can read slowly, and go away."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def data(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.data["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of a stream that is complete."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def ask(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: dict[str, str] | None = None,
    leaves_after: int | None = None,
    pause: float = 0.0,
) -> Reply:
    """POST where there is a body, GET where there is none, unless `method` says another one.

    `leaves_after`: parts of the answer, after which the client is gone; 0: at once. `pause`: seconds for each part.
    """
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"), "path": path, "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "", "scheme": "http", "server": ("localhost", 80), "client": ("localhost", 1),
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    reply, asked, gone, parts = Reply(), asyncio.Event(), asyncio.Event(), 0
    if leaves_after == 0:
        gone.set()

    async def receive() -> dict[str, Any]:
        if not asked.is_set():
            asked.set()
            return {"type": "http.request", "body": sent, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal parts
        if gone.is_set():
            return
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        await asyncio.sleep(pause)
        reply.body += message.get("body", b"")
        parts += 1
        if parts == leaves_after:
            gone.set()

    await app(scope, receive, send)
    return reply
