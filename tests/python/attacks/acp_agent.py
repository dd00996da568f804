"""An ACP agent that means harm: the text of each prompt is a Python program, and the turn runs it.

It runs inside a sandbox on the standard library alone. A program finds the connection to the server as `agent`.
What it raises is said as the turn's text, so that a test sees why an attack was not carried out.
"""

import json
import socket
import sys
import traceback


class Agent:
    """The agent's end of the connection: one JSON message a line."""

    def __init__(self):
        self.mcp_servers = []
        """`mcpServers` of `session/new`: how `oubliette-client` is started, its environment included."""
        self._next_id = 1
        self._answers = {}

    def write(self, message):
        """Sends a message, or bytes as they are."""
        if not isinstance(message, bytes):
            message = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        sys.stdout.buffer.write(message)
        sys.stdout.buffer.flush()

    def read(self):
        line = sys.stdin.buffer.readline()
        if not line:
            sys.exit(0)
        return json.loads(line)

    def update(self, kind, **fields):
        """Reports something to the session."""
        update = {"sessionUpdate": kind, **fields}
        self.write({"method": "session/update", "params": {"sessionId": "s", "update": update}})

    def say(self, text):
        self.update("agent_message_chunk", content={"type": "text", "text": text})

    def request(self, method, **params):
        """Asks the server something and does not wait."""
        id = f"a{self._next_id}"
        self._next_id += 1
        self.write({"id": id, "method": method, "params": params})
        return id

    def answer(self, id):
        """Waits for the answer to a request."""
        while id not in self._answers:
            message = self.read()
            if "method" not in message:
                self._answers[message["id"]] = message
        return self._answers.pop(id)

    def call(self, method, **params):
        return self.answer(self.request(method, **params))

    def environment(self, name):
        """A variable of `oubliette-client`, such as the session's key."""
        for server in self.mcp_servers:
            for variable in server.get("env", []):
                if variable["name"] == name:
                    return variable["value"]
        return None

    def touch_relay(self):
        """Connects to the relay socket and hangs up: an agent that never does is reported as being without its tools."""
        path = self.environment("OUBLIETTE_SOCKET")
        with socket.socket(socket.AF_UNIX) as relay:
            try:
                relay.connect(path)
            except OSError:
                pass

    def serve(self):
        while True:
            message = self.read()
            id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
            if id is None:
                continue
            if method == "initialize":
                result = {"protocolVersion": 1, "agentCapabilities": {}}
            elif method == "session/new":
                self.mcp_servers = params.get("mcpServers", [])
                self.touch_relay()
                result = {"sessionId": "s"}
            elif method == "session/prompt":
                self.run(params["prompt"][-1]["text"])
                result = {"stopReason": "end_turn"}
            else:
                self.write({"id": id, "error": {"code": -32601, "message": f"{method} is not offered"}})
                continue
            self.write({"id": id, "result": result})

    def run(self, program):
        try:
            exec(compile(program, "prompt", "exec"), {"agent": self})
        except Exception:
            self.say(traceback.format_exc())


Agent().serve()
