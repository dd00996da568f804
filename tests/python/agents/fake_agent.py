"""A fake ACP agent for tests: no model, no tools of its own. Its prompts are commands.

Its one argument is a JSON object:
    connect    whether it starts the MCP servers it is given (default true)
    relist     whether it lists tools again when it is told that they changed (default true)
    load       none, ok, fail, late (replays its history only with the next prompt); default none
    auth       whether it refuses to open a conversation before `authenticate` (default false)
    noise      a line that is not ACP, written to stdout before anything else
    dies       exits with 3 after the noise
"""

import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.error
import urllib.request

CONFIG = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
HISTORY = pathlib.Path(os.environ["HOME"]) / "history.json"
LOCK = threading.Lock()


def send(message):
    with LOCK:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


class Tools:
    """The MCP server it was given."""

    def __init__(self, spec):
        env = {**os.environ, **{e["name"]: e["value"] for e in spec.get("env", [])}}
        self.process = subprocess.Popen([spec["command"], *spec.get("args", [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.next, self.answers, self.changed = 0, {}, threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()
        self.request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "fake", "version": "1"}})
        self.write({"method": "notifications/initialized"})
        self.names = []
        self.list()

    def write(self, message):
        self.process.stdin.write((json.dumps({"jsonrpc": "2.0", **message}) + "\n").encode())
        self.process.stdin.flush()

    def read(self):
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("method") == "notifications/tools/list_changed":
                if CONFIG.get("relist", True):
                    threading.Thread(target=self.list, daemon=True).start()
            elif "id" in message and "method" not in message:
                with self.changed:
                    self.answers[message["id"]] = message
                    self.changed.notify_all()

    def request(self, method, params):
        with self.changed:
            self.next += 1
            id = self.next
        self.write({"id": id, "method": method, "params": params})
        with self.changed:
            self.changed.wait_for(lambda: id in self.answers)
            return self.answers.pop(id)

    def list(self):
        self.names = sorted(t["name"] for t in self.request("tools/list", {})["result"]["tools"])


class Agent:
    def __init__(self):
        self.session, self.tools, self.late, self.authenticated = "", None, [], False
        self.turns, self.prompts, self.asked, self.said = [], 0, 0, ""

    def update(self, **update):
        if update["sessionUpdate"] == "agent_message_chunk":
            self.said += update["content"]["text"]
        send({"method": "session/update", "params": {"sessionId": self.session, "update": update}})

    def chunk(self, kind, text):
        self.update(sessionUpdate=kind, content={"type": "text", "text": text})

    def start_tools(self, params):
        if CONFIG.get("connect", True) and params["mcpServers"]:
            self.tools = Tools(params["mcpServers"][0])

    def serve(self):
        for line in sys.stdin:
            message = json.loads(line)
            method, params, id = message.get("method"), message.get("params"), message.get("id")
            if method is None:
                self.outcome = message["result"]["outcome"]
                self.chunk("agent_message_chunk", json.dumps(self.outcome))
                self.end(self.pending)
            elif method == "initialize":
                methods = [{"id": "fake-api-key", "name": "API key"}] if CONFIG.get("auth") else []
                capabilities = {"loadSession": CONFIG.get("load", "none") != "none"}
                send({"id": id, "result": {"protocolVersion": 1, "agentCapabilities": capabilities, "authMethods": methods, "agentInfo": {"name": "fake", "version": "1"}}})
            elif method == "authenticate":
                self.authenticated = params["methodId"] == "fake-api-key"
                send({"id": id, "result": {}})
            elif method == "session/new":
                if CONFIG.get("auth") and not self.authenticated:
                    send({"id": id, "error": {"code": -32000, "message": "authentication required"}})
                    continue
                self.session = f"conversation-{os.getpid()}"
                self.start_tools(params)
                send({"id": id, "result": {"sessionId": self.session}})
            elif method == "session/load":
                self.load(id, params)
            elif method == "session/prompt":
                self.prompt(id, [block["text"] for block in params["prompt"]])
            elif method == "session/cancel":
                self.end(self.pending, "cancelled")

    def load(self, id, params):
        if CONFIG["load"] == "fail":
            send({"id": id, "error": {"code": -32603, "message": "that file is gone"}})
            return
        self.session = params["sessionId"]
        self.start_tools(params)
        self.turns = json.loads(HISTORY.read_text()) if HISTORY.exists() else []
        replay = [(kind, text) for turn in self.turns for kind, text in zip(("user_message_chunk", "agent_message_chunk"), turn)]
        if CONFIG["load"] == "late":
            self.late = replay
        else:
            for kind, text in replay:
                self.chunk(kind, text)
        send({"id": id, "result": None})

    def prompt(self, id, blocks):
        self.prompts += 1
        for kind, text in self.late:
            self.chunk(kind, text)
        self.late, self.said = [], ""
        text = blocks[-1]
        word, _, rest = text.partition(" ")
        self.pending = id
        if word == "hang":
            return
        if word == "storm":
            self.ask_model(*rest.split())
            return
        if word == "ask":
            self.asked += 1
            # A list begins with updates that announce the call.
            asked = json.loads(rest)
            *announced, call = asked if isinstance(asked, list) else [asked]
            for update in announced:
                self.update(**update)
            options = [{"optionId": kind, "name": kind, "kind": kind} for kind in ("allow_once", "reject_once")]
            send({"id": 1000 + self.asked, "method": "session/request_permission", "params": {"sessionId": self.session, "toolCall": call, "options": options}})
            return
        answer = self.answer(word, rest, blocks)
        if answer:
            self.chunk("agent_message_chunk", answer)
        self.turns.append([text, self.said])
        HISTORY.write_text(json.dumps(self.turns))
        self.end(id)

    def end(self, id, reason="end_turn"):
        send({"id": id, "result": {"stopReason": reason}})

    def answer(self, word, rest, blocks):
        if word == "tools":
            return " ".join(self.tools.names) if self.tools else "none"
        if word == "call":
            name, _, arguments = rest.partition(" ")
            return json.dumps(self.tools.request("tools/call", {"name": name, "arguments": json.loads(arguments)})["result"])
        if word == "updates":
            for update in json.loads(rest):
                self.update(**update)
            return ""
        if word == "read":
            return pathlib.Path(rest).read_text()
        if word == "env":
            return os.environ.get(rest, "")
        if word == "argv":
            return sys.argv[2]
        if word == "model":
            return self.ask_model(*rest.split())
        if word == "blocks":
            return "|".join(blocks)
        if word == "prompts":
            return str(self.prompts)
        return rest

    @staticmethod
    def ask_model(url, times):
        """Asks a model again and again, whatever it is answered; returns the statuses."""
        statuses = []
        for _ in range(int(times)):
            request = urllib.request.Request(url, b'{"model":"m","messages":[]}', {"Content-Type": "application/json"})
            try:
                statuses.append(urllib.request.urlopen(request).status)
            except urllib.error.HTTPError as refused:
                statuses.append(refused.code)
        return json.dumps(statuses)


if "noise" in CONFIG:
    print(CONFIG["noise"], flush=True)
if CONFIG.get("dies"):
    sys.exit(3)
Agent().serve()
