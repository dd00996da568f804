"""A fake model in the four request shapes that real agents speak: OpenAI chat, OpenAI Responses, Anthropic, Gemini.

It stands in for a paid model: it follows the directives it finds in the last message of the user, and nothing else
about it is real.

    [[say WORDS]]          answer with these words
    [[call NAME JSON]]     call the tool whose name ends with NAME; several are called one after the other
    [[recall]]             answer with every word the user asked to remember: [[remember WORD]]
    [[stream N]]           answer in N pieces, `piece-1` to `piece-N`
    [[hang]]               begin to answer and never end, until the request is closed

After the calls it answers `The tools said: ` and their results.
"""

from __future__ import annotations

import json
import re
import select
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator

DIRECTIVE = re.compile(r"\[\[(\w+)(?:\s+(.*?))?\]\]", re.S)
RETOLD = "It goes on with the next message."
"""How Oubliette ends an earlier conversation that it tells an agent anew: directives before it were followed then."""
HANG_SECONDS = 120.0
"""How long a hanging answer is kept open when nobody closes it."""


@dataclass
class Conversation:
    """What a request holds, whatever its shape."""

    tools: list[str] = field(default_factory=list)
    risk_rated: set[str] = field(default_factory=set)
    """Tools whose calls have to say how risky they are: OpenHands adds that to every tool."""
    items: list[tuple[str, str]] = field(default_factory=list)
    """(`user` | `assistant` | `call` | `result`, text) in order."""


@dataclass
class Reply:
    """What the model does: say pieces of text, or call one tool."""

    pieces: list[str] = field(default_factory=list)
    call: tuple[str, dict[str, Any]] | None = None
    hang: bool = False
    pause: float = 0.0
    """Seconds between the pieces, as a model takes its time."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def text_of(content: Any) -> str:
    """The text of a message's content in any of the shapes."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(text_of(part) for part in content)
    if isinstance(content, dict):
        for name in ("text", "content", "output", "response"):
            if name in content:
                return text_of(content[name]) if not isinstance(content[name], dict) else json.dumps(content[name])
    return ""


def read_chat(request: dict[str, Any]) -> Conversation:
    functions = [t["function"] for t in request.get("tools") or [] if "function" in t]
    said = Conversation([function["name"] for function in functions])
    said.risk_rated = {f["name"] for f in functions if "security_risk" in f.get("parameters", {}).get("properties", {})}
    for message in request.get("messages", []):
        if message["role"] == "tool":
            said.items.append(("result", text_of(message.get("content"))))
        elif message["role"] in ("user", "assistant"):
            said.items.append((message["role"], text_of(message.get("content"))))
            said.items += [("call", call["function"]["name"]) for call in message.get("tool_calls") or []]
    return said


def read_responses(request: dict[str, Any]) -> Conversation:
    said = Conversation(list(response_tools(request)))
    content = request.get("input", [])
    for item in [{"role": "user", "content": content}] if isinstance(content, str) else content:
        if item.get("type") in ("function_call_output", "custom_tool_call_output"):
            said.items.append(("result", text_of(item.get("output"))))
        elif item.get("type") in ("function_call", "custom_tool_call"):
            said.items.append(("call", item["name"]))
        elif item.get("role") in ("user", "assistant"):
            said.items.append((item["role"], text_of(item.get("content"))))
    return said


def response_tools(request: dict[str, Any]) -> dict[str, str | None]:
    """The tools of a Responses request: name and, for a tool of a namespace, that namespace."""
    found: dict[str, str | None] = {}
    for tool in request.get("tools") or []:
        if tool.get("type") == "namespace":
            found.update({inner["name"]: tool["name"] for inner in tool.get("tools", []) if "name" in inner})
        elif "name" in tool:
            found[tool["name"]] = None
    return found


def read_anthropic(request: dict[str, Any]) -> Conversation:
    said = Conversation([t["name"] for t in request.get("tools") or []])
    for message in request.get("messages", []):
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for part in parts:
            if part.get("type") == "tool_result":
                said.items.append(("result", text_of(part.get("content"))))
            elif part.get("type") == "tool_use":
                said.items.append(("call", part["name"]))
            elif part.get("type") == "text":
                said.items.append((message["role"], part["text"]))
    return said


def read_gemini(request: dict[str, Any]) -> Conversation:
    declared = [f for t in request.get("tools") or [] for f in t.get("functionDeclarations", [])]
    said = Conversation([f["name"] for f in declared])
    for content in request.get("contents", []):
        for part in content.get("parts", []):
            if "functionResponse" in part:
                said.items.append(("result", json.dumps(part["functionResponse"].get("response"))))
            elif "functionCall" in part:
                said.items.append(("call", part["functionCall"]["name"]))
            elif "text" in part:
                said.items.append(("user" if content.get("role") == "user" else "assistant", part["text"]))
    return said


def is_search(tool: str) -> bool:
    return tool.lower().replace("_", "") == "toolsearch"


def decide(said: Conversation) -> Reply:
    """What the model does next in a conversation."""
    asked = [(i, DIRECTIVE.findall(text.rpartition(RETOLD)[2])) for i, (who, text) in enumerate(said.items) if who == "user"]
    asked = [(i, directives) for i, directives in asked if directives]
    if not asked or not said.tools:  # agents make requests of their own, for a title or a summary
        return Reply(["A title"])
    at, directives = asked[-1]
    for earlier, same in reversed(asked):  # agents repeat the message in reminders of their own
        if same != directives:
            break
        at = earlier
    called = [text for who, text in said.items[at:] if who == "call"]
    results = [text for who, text in said.items[at:] if who == "result"]
    searched = any(is_search(name) for name in called)
    if len(called) == len(results):
        results = [result for name, result in zip(called, results) if not is_search(name)]
    calls = [words for what, words in directives if what == "call"]
    if len(results) < len(calls):
        name, _, arguments = calls[len(results)].partition(" ")
        known = [tool for tool in said.tools if tool == name] or [tool for tool in said.tools if tool.endswith(name)]
        search = [tool for tool in said.tools if is_search(tool)]
        if not known and search and not searched:  # some agents show a tool only after it was searched for
            return Reply(call=(search[0], {"query": name, "max_results": 5}))
        if not known:
            return Reply([f"no tool {name} among {' '.join(sorted(said.tools))}"])
        risk = {"security_risk": "LOW"} if known[0] in said.risk_rated else {}
        return Reply(call=(known[0], risk | json.loads(arguments or "{}")))
    if calls:
        return Reply(["The tools said: ", " ".join(results)])
    pieces: list[str] = []
    for what, words in directives:
        if what == "say":
            pieces.append(words)
        elif what == "recall":
            told = [w for who, text in said.items if who == "user" for d, w in DIRECTIVE.findall(text) if d == "remember"]
            pieces.append("remembered: " + " ".join(told))
        elif what == "stream":
            return Reply([f"piece-{n} " for n in range(1, int(words) + 1)], pause=0.2)
        elif what == "hang":
            return Reply(["beginning "], hang=True)
    return Reply(pieces or ["noted"])


# -- the four shapes, streamed and not -----------------------------------------------------------------


def stream_chat(reply: Reply, call_id: str, model: str) -> Iterator[tuple[str | None, Any]]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> tuple[None, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": f"chat_{call_id}", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}
        if finish:
            body["usage"] = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        return None, body

    if reply.call:
        name, arguments = reply.call
        call = {"index": 0, "id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        yield chunk({"role": "assistant", "tool_calls": [call]})
        yield chunk({}, "tool_calls")
        return
    for piece in reply.pieces:
        yield chunk({"role": "assistant", "content": piece})
    if not reply.hang:
        yield chunk({}, "stop")


def whole_chat(reply: Reply, call_id: str, model: str) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.call:
        function = {"name": reply.call[0], "arguments": json.dumps(reply.call[1])}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if reply.call else "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    return {"id": f"chat_{call_id}", "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": usage}


def response_item(reply: Reply, call_id: str, namespace: str | None) -> dict[str, Any]:
    if reply.call:
        call = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": reply.call[0], "arguments": json.dumps(reply.call[1]), "status": "completed"}
        return {**call, "namespace": namespace} if namespace else call
    content = [{"type": "output_text", "text": reply.text, "annotations": []}]
    return {"type": "message", "id": f"msg_{call_id}", "role": "assistant", "status": "completed", "content": content}


def stream_responses(reply: Reply, call_id: str, model: str, namespace: str | None) -> Iterator[tuple[str | None, Any]]:
    begun = {"id": f"resp_{call_id}", "object": "response", "created_at": 0, "status": "in_progress", "model": model, "output": []}
    number = 0

    def event(kind: str, **more: Any) -> tuple[str, Any]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number, **more}

    item = response_item(reply, call_id, namespace)
    yield event("response.created", response=begun)
    if reply.call:
        yield event("response.output_item.added", output_index=0, item={**item, "arguments": "", "status": "in_progress"})
        yield event("response.function_call_arguments.delta", output_index=0, item_id=item["id"], delta=item["arguments"])
        yield event("response.function_call_arguments.done", output_index=0, item_id=item["id"], arguments=item["arguments"])
    else:
        yield event("response.output_item.added", output_index=0, item={**item, "content": [], "status": "in_progress"})
        part = {"type": "output_text", "text": "", "annotations": []}
        yield event("response.content_part.added", output_index=0, content_index=0, item_id=item["id"], part=part)
        for piece in reply.pieces:
            yield event("response.output_text.delta", output_index=0, content_index=0, item_id=item["id"], delta=piece)
        if reply.hang:
            return
        yield event("response.output_text.done", output_index=0, content_index=0, item_id=item["id"], text=reply.text)
    yield event("response.output_item.done", output_index=0, item=item)
    yield event("response.completed", response=whole_responses(reply, call_id, model, namespace))


def whole_responses(reply: Reply, call_id: str, model: str, namespace: str | None) -> Any:
    usage = {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12, "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {"id": f"resp_{call_id}", "object": "response", "created_at": 0, "status": "completed", "model": model, "output": [response_item(reply, call_id, namespace)], "usage": usage}


def stream_anthropic(reply: Reply, call_id: str, model: str) -> Iterator[tuple[str | None, Any]]:
    usage = {"input_tokens": 7, "output_tokens": 1}
    message = {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield "message_start", {"type": "message_start", "message": message}
    block = {"type": "tool_use", "id": f"toolu_{call_id}", "name": reply.call[0], "input": {}} if reply.call else {"type": "text", "text": ""}
    yield "content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}
    if reply.call:
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(reply.call[1])}]
    else:
        deltas = [{"type": "text_delta", "text": piece} for piece in reply.pieces]
    for delta in deltas:
        yield "content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}
    if reply.hang:
        return
    yield "content_block_stop", {"type": "content_block_stop", "index": 0}
    stop = {"stop_reason": "tool_use" if reply.call else "end_turn", "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 5}}
    yield "message_stop", {"type": "message_stop"}


def whole_anthropic(reply: Reply, call_id: str, model: str) -> Any:
    content = [{"type": "text", "text": reply.text}]
    if reply.call:
        content = [{"type": "tool_use", "id": f"toolu_{call_id}", "name": reply.call[0], "input": reply.call[1]}]
    stop = "tool_use" if reply.call else "end_turn"
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model, "content": content, "stop_reason": stop, "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": 5}}


def gemini_chunk(parts: list[dict[str, Any]], finish: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
    if finish:
        candidate["finishReason"] = "STOP"
    usage = {"promptTokenCount": 7, "candidatesTokenCount": 5, "totalTokenCount": 12}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}


def gemini_parts(reply: Reply) -> list[dict[str, Any]]:
    if reply.call:
        return [{"functionCall": {"name": reply.call[0], "args": reply.call[1]}}]
    return [{"text": piece} for piece in reply.pieces]


def stream_gemini(reply: Reply) -> Iterator[tuple[str | None, Any]]:
    parts = gemini_parts(reply)
    for i, part in enumerate(parts):
        yield None, gemini_chunk([part], finish=not reply.hang and i == len(parts) - 1)


class AgentModel:
    """The server, on a free port of loopback."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.hanging = 0
        """How many answers were begun that never end."""
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                models = [{"id": "m", "object": "model", "created": 0, "owned_by": "scripted"}]
                self.answer({"object": "list", "data": models, "models": []})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = json.loads(body or b"{}")
                with outer.lock:
                    outer.requests.append({"path": self.path, **request})
                    call_id = f"call_{len(outer.requests)}"
                model = request.get("model", "m")
                path = self.path.partition("?")[0]
                if path.endswith("count_tokens"):
                    return self.answer({"input_tokens": 7})
                if path.endswith("countTokens"):
                    return self.answer({"totalTokens": 7})
                streamed = request.get("stream") or ":streamGenerateContent" in path
                if path.endswith("/chat/completions"):
                    reply = decide(read_chat(request))
                    return self.send(reply, stream_chat(reply, call_id, model), True) if streamed else self.answer(whole_chat(reply, call_id, model), reply)
                if path.endswith("/responses"):
                    reply = decide(read_responses(request))
                    namespace = response_tools(request).get(reply.call[0]) if reply.call else None
                    return self.send(reply, stream_responses(reply, call_id, model, namespace)) if streamed else self.answer(whole_responses(reply, call_id, model, namespace), reply)
                if path.endswith("/messages"):
                    reply = decide(read_anthropic(request))
                    return self.send(reply, stream_anthropic(reply, call_id, model)) if streamed else self.answer(whole_anthropic(reply, call_id, model), reply)
                reply = decide(read_gemini(request))
                if streamed:
                    return self.send(reply, stream_gemini(reply))
                self.answer(gemini_chunk(gemini_parts(reply), finish=True), reply)

            def answer(self, body: Any, reply: Reply = Reply()) -> None:
                if reply.hang:
                    with outer.lock:
                        outer.hanging += 1
                    end = time.monotonic() + HANG_SECONDS
                    # A connection that can be read was closed.
                    while time.monotonic() < end and not outer.stopping.wait(0.2):
                        if select.select([self.connection], [], [], 0)[0]:
                            return
                text = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def send(self, reply: Reply, events: Iterator[tuple[str | None, Any]], done: bool = False) -> None:
                self.close_connection = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                try:
                    for name, event in events:
                        head = f"event: {name}\n" if name else ""
                        self.wfile.write(f"{head}data: {json.dumps(event)}\n\n".encode())
                        self.wfile.flush()
                        if reply.pause:
                            time.sleep(reply.pause)
                    if reply.hang:
                        with outer.lock:
                            outer.hanging += 1
                        end = time.monotonic() + HANG_SECONDS
                        while time.monotonic() < end and not outer.stopping.wait(0.2):
                            self.wfile.write(b": waiting\n\n")
                            self.wfile.flush()
                    if done:
                        self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    pass  # the agent has closed the request

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
