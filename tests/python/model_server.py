"""A scripted model behind an OpenAI-compatible endpoint, in place of a paid one.

Real agents call it over HTTP. It requests the tool calls of its `plan` one after the other, then answers with
their results.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ModelServer:
    def __init__(self, plan: list[tuple[str, dict[str, Any]]]):
        """`plan`: pairs of (end of a tool's name, arguments)."""
        self.plan = plan
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, **request})
                outer.headers.append({k.lower(): v for k, v in self.headers.items()})
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for delta, finish in outer.reply(request):
                    choice = {"index": 0, "delta": delta, "finish_reason": finish}
                    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
                    if finish:
                        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, request: dict[str, Any]) -> list[tuple[dict[str, Any], str | None]]:
        tools = [t["function"]["name"] for t in request.get("tools", [])]
        if not tools:  # some agents make a separate request for a title
            return [({"role": "assistant", "content": "A title"}, None), ({}, "stop")]
        results = [m for m in request["messages"] if m["role"] == "tool"]
        if len(results) < len(self.plan):
            suffix, arguments = self.plan[len(results)]
            name = next((t for t in tools if t.endswith(suffix)), None)
            if name is None:
                return [({"role": "assistant", "content": f"no tool {suffix} among {tools}"}, None), ({}, "stop")]
            call = {"index": 0, "id": f"call_{len(results)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            return [({"role": "assistant", "tool_calls": [call]}, None), ({}, "tool_calls")]
        said = " ".join(str(m["content"]) for m in results) or "nothing to do"
        return [({"role": "assistant", "content": f"The tools said: {said}"}, None), ({}, "stop")]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
