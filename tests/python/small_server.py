"""The smallest MCP server over stdio: one tool.

`--child`: it also starts a child process that ends only when the whole process tree is killed. `--odd`: it also lists
invalid and oversized tools.
"""

import json
import signal
import subprocess
import sys

CHILD = None
if "--child" in sys.argv:
    # It ignores SIGTERM and the closing of stdin. It is started before the first answer is sent.
    deaf = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    CHILD = subprocess.Popen(["/bin/sleep", "1000000"], stdin=subprocess.DEVNULL, preexec_fn=deaf)

TOOLS = '{"name": "echo", "inputSchema": {"type": "object"}}'
if "--odd" in sys.argv:
    deep = '{"properties": {"a": ' * 5000 + "{}" + "}}" * 5000
    wide = json.dumps({"type": "object", "properties": {f"p{n}": {"$ref": "#"} for n in range(20000)}})
    odd = [
        '{"name": "liar", "inputSchema": {"type": "string"}}',
        '{"name": "nonsense", "inputSchema": 5}',
        f'{{"name": "deep", "inputSchema": {deep}}}',
        f'{{"name": "wide", "inputSchema": {wide}}}',
        f'{{"name": "{"n" * 10000}", "inputSchema": {{"type": "object"}}}}',
        '{"name": "echo", "inputSchema": {"type": "object"}}',
        '{"name": "a.b", "inputSchema": {"type": "object"}}',
        '{"name": "a/b", "inputSchema": {"type": "object"}}',
        '"no object"',
    ]
    TOOLS = ", ".join([TOOLS, *odd])

for line in sys.stdin:
    message = json.loads(line)
    id, method = message.get("id"), message.get("method")
    if id is None:
        continue
    answer = {"jsonrpc": "2.0", "id": id}
    if method == "initialize":
        answer["result"] = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "small", "version": "1"},
        }
    elif method == "tools/list":
        sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {json.dumps(id)}, "result": {{"tools": [{TOOLS}]}}}}\n')
        sys.stdout.flush()
        continue
    elif method == "tools/call":
        answer["result"] = {"content": [{"type": "text", "text": json.dumps(message["params"].get("arguments", {}))}]}
    elif method == "ping":
        answer["result"] = {}
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
