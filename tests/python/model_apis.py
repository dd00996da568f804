"""A fake model that speaks all four model APIs, in place of paid ones: OpenAI chat and Responses, Anthropic, Gemini.

It answers every request with the same text and says what that used, streamed or not, as the request asks. How it says it,
or that it does not, is set by `style`.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INPUT, CACHED, OUTPUT = 100, 40, 20
"""What an answer says it used: all input, the part of it that was cached, all output."""
TEXT = "forty bytes of text that are ten tokens."


def usage(api: str) -> dict[str, Any]:
    """The same counts in the words of each API."""
    if api == "chat":
        return {"prompt_tokens": INPUT, "completion_tokens": OUTPUT, "total_tokens": INPUT + OUTPUT, "prompt_tokens_details": {"cached_tokens": CACHED}}
    if api == "responses":
        return {"input_tokens": INPUT, "input_tokens_details": {"cached_tokens": CACHED}, "output_tokens": OUTPUT, "output_tokens_details": {"reasoning_tokens": 5}}
    if api == "messages":
        return {"input_tokens": INPUT - CACHED - 10, "cache_creation_input_tokens": 10, "cache_read_input_tokens": CACHED, "output_tokens": OUTPUT}
    return {"promptTokenCount": INPUT, "cachedContentTokenCount": CACHED, "candidatesTokenCount": OUTPUT - 5, "thoughtsTokenCount": 5}


BAD_USAGE = {"prompt_tokens": -1, "completion_tokens": "many", "input_tokens": 1e300, "output_tokens": [], "promptTokenCount": None, "candidatesTokenCount": {}}


class ModelApis:
    """`style`: "told", "silent", "bad" (counts that cannot be) or "cut" (the stream breaks off in the middle).

    `gate`: if set, each request waits for it before it is answered, and counts itself in `waiting`.
    """

    def __init__(self, style: str = "told"):
        self.style = style
        self.requests: list[str] = []
        self.gate: threading.Event | None = None
        self.waiting = threading.Semaphore(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.split("?")[0]
                outer.requests.append(path)
                if outer.gate:
                    outer.waiting.release()
                    # The test ends the wait; this only keeps a failed one from leaving a thread.
                    outer.gate.wait(timeout=1800)
                api = next(api for end, api in APIS if path.endswith(end))
                streamed = request.get("stream") or path.endswith(":streamGenerateContent")
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream" if streamed else "application/json")
                self.send_header("Connection", "close")
                self.end_headers()
                for piece in outer.pieces(api, bool(streamed)):
                    self.wfile.write(piece.encode())
                    self.wfile.flush()
                self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.request_queue_size = 128
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def pieces(self, api: str, streamed: bool) -> list[str]:
        told = {"told": usage(api), "bad": BAD_USAGE, "cut": usage(api)}.get(self.style)
        if not streamed:
            return [json.dumps(whole(api, told))]
        events = stream(api, told)
        # Cut in the middle of an event, after the one that has the text.
        if self.style == "cut":
            text = next(i for i, event in enumerate(events) if TEXT in event)
            return [*events[:text], events[text], events[text + 1][:15] if text + 1 < len(events) else ""]
        return events

    def close(self) -> None:
        if self.gate:
            self.gate.set()
        self.server.shutdown()
        self.server.server_close()


APIS = [
    ("/chat/completions", "chat"),
    ("/responses", "responses"),
    ("/messages", "messages"),
    (":generateContent", "gemini"),
    (":streamGenerateContent", "gemini"),
]


def whole(api: str, told: dict[str, Any] | None) -> dict[str, Any]:
    if api == "gemini":
        answer = {"candidates": [{"content": {"role": "model", "parts": [{"text": TEXT}]}, "finishReason": "STOP"}], "modelVersion": "m"}
        return {**answer, "usageMetadata": told} if told else answer
    answer = {
        "chat": {"id": "c", "object": "chat.completion", "model": "m", "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}]},
        "responses": {"id": "r", "object": "response", "model": "m", "status": "completed", "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}]}]},
        "messages": {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn"},
    }[api]
    return {**answer, "usage": told} if told else answer


def stream(api: str, told: dict[str, Any] | None) -> list[str]:
    def data(event: dict[str, Any]) -> str:
        return f"data: {json.dumps(event)}\n\n"

    if api == "chat":
        chunk = {"id": "c", "object": "chat.completion.chunk", "model": "m"}
        events = [data({**chunk, "choices": [{"index": 0, "delta": {"role": "assistant", "content": TEXT}, "finish_reason": None}]})]
        events += [data({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})]
        events += [data({**chunk, "choices": [], "usage": told})] if told else []
        return [*events, "data: [DONE]\n\n"]
    if api == "responses":
        response = {"id": "r", "model": "m", "status": "completed", "output": []}
        return [
            data({"type": "response.created", "response": {**response, "usage": None}}),
            data({"type": "response.output_text.delta", "delta": TEXT}),
            data({"type": "response.output_text.done", "text": TEXT}),
            data({"type": "response.completed", "response": {**response, "usage": told}}),
        ]
    if api == "messages":
        begun, last = told or {}, told or {}
        if told and told is not BAD_USAGE:
            begun, last = {**told, "output_tokens": 1}, {"output_tokens": told["output_tokens"]}
        events = [
            {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": begun}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": last},
            {"type": "message_stop"},
        ]
        return [f"event: {event['type']}\n{data(event)}" for event in events]
    first = {"candidates": [{"content": {"role": "model", "parts": [{"text": TEXT}]}}], "modelVersion": "m"}
    if told:
        # Gemini repeats its counts with every event, the output growing.
        first["usageMetadata"] = {**told, "candidatesTokenCount": 1 if told is not BAD_USAGE else None}
    last = {"candidates": [{"content": {"role": "model", "parts": [{"text": ""}]}, "finishReason": "STOP"}]}
    return [data(first), data({**last, "usageMetadata": told} if told else last)]
