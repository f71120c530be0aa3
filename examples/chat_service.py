"""A service that answers questions as JSON: one session for all clients, a shared system message, a schema.

    python examples/chat_service.py my-export/ --port 8090
    curl --data "What is the capital of France?" http://127.0.0.1:8090/

Every thread may call the session, and requests that run at the same time share its steps. The system message is
computed once: its cache rows are kept for all prompts that begin with it. Needs the extras `text` and `structured`.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trt_kvcache import DecodeSession, Grammars, TrtKvCacheError
from trt_kvcache.decoding import Schedule

__all__ = ["Service", "serve"]

SYSTEM = "Answer the question in JSON, with a short answer and how sure you are of it, from 0 to 9."
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 80},
        "sure": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


class Service:
    """Answers questions with a session, which stays open."""

    def __init__(self, session: DecodeSession) -> None:
        self.session = session
        self.grammar = Grammars(session).json_schema(SCHEMA)  # compiled once

    def answer(self, question: str) -> dict[str, Any]:
        """Return what the schema says."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        made = self.session.chat(messages, grammar=self.grammar, max_new_tokens=200)
        if made.finish_reason != "eos":  # a text that was cut is a beginning of what the schema allows
            raise ValueError(f"the answer has no end after {len(made.tokens)} tokens")
        found: dict[str, Any] = json.loads(made.text)
        return found


def serve(service: Service, port: int) -> ThreadingHTTPServer:
    """Return a server that is bound; `serve_forever` runs it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = self.rfile.read(int(self.headers["Content-Length"])).decode()
            try:
                status, body = 200, service.answer(question)
            except (TrtKvCacheError, ValueError) as error:
                status, body = 422, {"error": str(error)}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    with DecodeSession.open(given.model, schedule=Schedule(prefix_cache=256 << 20)) as session:
        server = serve(Service(session), given.port)
        print(f"http://127.0.0.1:{server.server_port}/ on {session.name}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(session.cache.prefix_stats)


if __name__ == "__main__":
    main()
