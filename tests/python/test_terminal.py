"""`oubliette chat` and `oubliette top` in a real terminal: what a person sees after every escape sequence, and the keys they press."""

from __future__ import annotations

import os
import stat
import time

import pytest

from caller import call
from harness import running
from terminal import Screen

WRITE = {"kind": "builtin", "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}
PROMPT = "› "


@pytest.fixture
def chat(server, admin, project):
    """Starts a chat with an agent that follows these turns."""

    def start(turns, *args, agent="terminal", **options):
        server.put_tool("writer", admin, **WRITE)
        server.put_agent(agent, admin, turns, tools={"use": ["writer"], "ask": options.pop("ask", [])})
        return Screen(server, "chat", "--agent", agent, "--project", project, *args, **options)

    return start


def newest(server, admin, project):
    return server.api("session_list", admin, project_id=project)["sessions"][0]


def sent(server, admin, project):
    """The messages of the newest session, as the agent got them."""
    events = server.api("session_events", admin, session_id=newest(server, admin, project)["session_id"], max_events=1000)["events"]
    return [event["text"] for event in events if event["type"] == "message" and event["role"] == "user"]


def at_prompt(text):
    """Whether the last line on the screen is an empty prompt with the status above it."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return len(lines) > 1 and lines[-1] == "›" and " · " in lines[-2] and "Ctrl-C cancels" not in lines[-2]


def idle(text):
    return at_prompt(text) and " · idle" in text


MARKDOWN = """# A title

Some **bold** and *slanted* words with `code`, and a [link](https://docs.example/x) in a sentence that is longer than the line.

- first item
- second item that is long enough that it has to be continued on a line of its own, where it hangs
  1. inner

```rust
let x = **y;
```

> quoted
"""


def test_markdown_is_rendered_and_wrapped_at_words(chat):
    with chat([[{"say": MARKDOWN}]], columns=60) as screen:
        screen.until(at_prompt)
        screen.type("go")
        text = screen.until(idle)
        assert "**" not in text.replace("let x = **y;", "") and "# A" not in text and "```" not in text
        lines = [line.rstrip() for line in text.splitlines()]
        assert "A title" in lines and "  let x = **y;" in lines and "• first item" in lines and "│ quoted" in lines and "  1. inner" in lines
        assert any(line.startswith("  ") and "hangs" in line for line in lines)
        assert "link (https://docs.example/x)" in " ".join(lines)
        # No word is cut at the end of a line.
        for word in ("sentence", "longer", "enough", "continued"):
            assert any(word in line.split() for line in lines), (word, text)
        assert b"\x1b[1mbold\x1b[0m" in screen.written


TABLE = """Before.

| Part | Lines | 状態 |
|:-----|------:|:----:|
| `server` | 120 | 良い |
| a part with a long name that has to be wrapped, since the terminal is narrow | 7 | ok\x1b[2J |

After.
"""


def test_tables_are_aligned_and_fit_the_terminal(chat):
    with chat([[{"say": TABLE}]], columns=60) as screen:
        screen.until(at_prompt)
        screen.type("go")
        text = screen.until(idle)
        lines = [line.rstrip() for line in text.splitlines()]
        # The screen is read back as the terminal laid it out, where a wide character takes two columns.
        at = next(n for n, line in enumerate(lines) if line.startswith("Part"))
        assert "┼" in lines[at + 1] and lines[at + 2].startswith("server") and "120 │ 良い" in lines[at + 2]
        assert any("wrapped" in line for line in lines) and "After." in lines
        ends = [line.rfind("│") for line in lines[at : at + 3] if "│" in line]
        assert len(set(ends)) == 1, text
        assert max(len(line) for line in lines) <= 60 and b"\x1b[2J" not in screen.written


def test_calls_are_compact_lines_and_the_status_says_agent_state_and_approvals(chat, server, admin, project):
    steps = [call("writer_fs_write", path="a.txt", content="x"), call("writer_fs_write", path="/etc/no", content="y"), {"say": "all done"}]
    with chat([steps], ask=["writer_fs_write"]) as screen:
        screen.until(lambda text: "no session yet" in text and at_prompt(text))
        screen.type("go")
        text = screen.until("y or n, a for all of this session")
        screen.until(lambda text: "terminal · waiting for approval" in text and "1 approval waits" in text and "Ctrl-C cancels" in text)
        screen.type("a")
        text = screen.until(idle)
        lines = [line.rstrip() for line in text.splitlines()]
        done = [line for line in lines if line.startswith("✓ writer_fs_write")]
        assert len(done) == 1 and 'path="a.txt"' in done[0] and done[0].endswith("s") and " · " in done[0]
        failed = lines.index(next(line for line in lines if line.startswith("✗ writer_fs_write")))
        assert lines[failed + 1].startswith("  └ "), lines[failed : failed + 2]
        assert text.count("all done") == 1 and text.count("Ctrl-C cancels") == 0


def test_nothing_that_an_agent_or_a_tool_writes_acts_on_the_terminal(chat):
    bad = "\x1b]0;OWNED\x07\x1b[2J\x1b[31mred\u202eright\u200bto\u2066left \x9b5mblink `\x1b[8m` [x\x1b[1A](http://e\x1b[2K)\r over"
    long = "n" * 10_000
    steps = [{"say": f"before\n\n{bad}\n\n```\n{bad}\n```\n"}, call(long + "\x1b[2J", text=bad), call("writer_fs_write", path=bad + "/" + long, content=bad), {"say": "after"}]
    with chat([steps]) as screen:
        screen.until(at_prompt)
        title = screen.title
        screen.type("go")
        text = screen.until(lambda text: "after" in text and idle(text))
        assert screen.title == title and "before" in screen.history
        written = screen.written.decode()
        for escape in ("\x1b]0;", "\x1b[2J", "\x1b[31mred", "\u202e", "\u200b", "\u2066", "\x9b", "\x1b[8m", "\x1b[2K)"):
            assert escape not in written, escape
        assert "redrighttoleft" in screen.history
        # A name of 10,000 characters takes one line.
        assert max(len(line) for line in screen.history.splitlines()) <= 200, screen.history


def test_ctrl_c_cancels_the_turn_at_once_and_twice_at_the_prompt_leaves(chat, server, admin, project):
    with chat([[{"say": "begun\n"}, {"sleep_ms": 120_000}, {"say": "never"}]]) as screen:
        screen.until(at_prompt)
        screen.type("go")
        screen.until(lambda text: "begun" in text and "Ctrl-C cancels" in text)
        screen.type("a line for later")
        screen.until("queued: a line for later")
        began = time.monotonic()
        screen.keys("C-c")
        screen.until("cancelling the turn")
        # What was typed ahead is not sent after a cancel, and not lost either.
        text = screen.until(lambda text: text.rstrip().endswith("› a line for later"))
        assert "cancelled" in text and "never" not in text and time.monotonic() - began < 60
        assert newest(server, admin, project)["status"] == "idle" and sent(server, admin, project) == ["go"]
        # With something in the line it only clears the line.
        screen.keys("C-c")
        text = screen.until(at_prompt)
        assert "Ctrl-D, leaves" not in text
        screen.keys("C-c")
        screen.until("Ctrl-C again, or Ctrl-D, leaves")
        screen.until(at_prompt)
        screen.keys("C-c")
        assert screen.wait() == 0
        assert "the session stays" in screen.text and newest(server, admin, project)["status"] == "idle"


def test_ctrl_c_clears_what_is_typed_and_leaves_only_at_an_empty_prompt(chat, server, admin, project):
    with chat([[{"say": "one"}]]) as screen:
        screen.until(at_prompt)
        screen.keys("C-c")
        screen.until("Ctrl-C again, or Ctrl-D, leaves")
        screen.until(at_prompt)
        # One at an empty prompt before does not count once something was typed, wherever the cursor is and however many lines it has.
        for draft in ("a draft", "/age", "two\nlines"):
            screen.paste(draft)
            screen.until(lambda text, draft=draft: all(line in text for line in draft.splitlines()))
            screen.keys("Left")
            screen.keys("C-c")
            screen.until(lambda text: at_prompt(text) and text.count("leaves") == 1)
        # In a search of the history it ends the search.
        screen.type("go")
        screen.until(idle)
        screen.keys("C-r")
        screen.until("history:")
        screen.keys("C-c")
        screen.until(lambda text: idle(text) and "history:" not in text)
        screen.keys("C-c")
        screen.until(lambda text: at_prompt(text) and text.count("leaves") == 2)
        screen.keys("C-c")
        assert screen.wait() == 0
        assert sent(server, admin, project) == ["go"]


def test_ctrl_d_at_an_empty_prompt_leaves(chat):
    with chat([[{"say": "hi"}]]) as screen:
        screen.until(at_prompt)
        screen.keys("C-d")
        assert screen.wait() == 0


def test_lines_typed_while_a_turn_runs_are_sent_when_it_has_ended(chat, server, admin, project):
    turns = [[{"say": "first\n"}, call("writer_fs_write", path="a", content="x"), {"say": "one"}], [{"say": "two"}]]
    with chat(turns, ask=["writer_fs_write"]) as screen:
        screen.until(at_prompt)
        screen.type("go")
        screen.until("first")
        screen.until("y or n")
        screen.type("y")
        # The turn may be over already: then it is simply the next message.
        screen.type("the second")
        screen.type_only("a draft")
        text = screen.until(lambda text: "two" in text and text.rstrip().endswith("› a draft"))
        assert sent(server, admin, project) == ["go", "the second"], text


def test_the_status_line_survives_a_change_of_size(chat):
    with chat([[{"say": "word " * 60 + "\n"}, {"sleep_ms": 120_000}]], columns=100) as screen:
        screen.until(at_prompt)
        screen.type("go")
        screen.until("Ctrl-C cancels")
        for columns, rows in [(60, 20), (120, 30), (45, 12)]:
            screen.resize(columns, rows)
            text = screen.until(lambda text: text.rstrip().endswith("›") and text.count("terminal · working") == 1)
            assert max(len(line) for line in text.splitlines()) <= columns
        screen.keys("C-c")
        screen.until(at_prompt)
        for columns, rows in [(100, 30), (50, 15), (90, 25)]:
            screen.resize(columns, rows)
            screen.until(lambda text: at_prompt(text) and text.count("terminal · idle") == 1)
        screen.type_only("still works")
        screen.until("› still works")


def test_several_lines_are_typed_and_pasted_as_one_message(chat, server, admin, project):
    with chat([[{"say": "one"}], [{"say": "two"}], [{"say": "three"}]]) as screen:
        screen.until(at_prompt)
        screen.paste("line one\nline two\n/quit")
        screen.until(lambda text: "line two" in text and "/quit" in text)
        screen.keys("Enter")
        screen.until(idle)
        screen.type_only("alpha")
        screen.keys("M-Enter")
        screen.type_only("beta")
        screen.keys("Enter")
        screen.until(lambda text: "two" in text.split("beta")[-1] and idle(text))
        screen.type("gamma\\")
        screen.type("delta")
        screen.until(lambda text: "three" in text.split("delta")[-1] and idle(text))
        assert sent(server, admin, project) == ["line one\nline two\n/quit", "alpha\nbeta", "gamma\ndelta"]


def test_history_is_kept_for_the_next_chat_and_for_its_owner_alone(chat, server):
    with chat([[{"say": "hi"}]]) as screen:
        screen.until(at_prompt)
        screen.type("words to remember")
        screen.until(idle)
        screen.type(" words to forget")
        screen.until(lambda text: text.count("hi") > 1 and idle(text))
        screen.type("/quit")
        assert screen.wait() == 0
    file = server.home / "history" / "chat-local"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "words to remember" in file.read_text() and "forget" not in file.read_text()
    with chat([[{"say": "hi"}]]) as screen:
        screen.until(at_prompt)
        screen.keys("Up", "Up")
        screen.until(lambda text: text.rstrip().endswith("› words to remember"))
        screen.keys("C-c")
        # It clears what is typed, and stays.
        screen.until(lambda text: "words to remember" not in text and at_prompt(text))
        screen.keys("C-d")
        assert screen.wait() == 0


def test_commands_agents_and_files_are_completed(chat, server, admin, project):
    server.put_agent("tabtarget", admin, [[{"say": "hi from the target"}]])
    with chat([[call("writer_fs_write", path="notes/alpha.txt", content="x"), {"say": "written"}], [{"say": "read"}]]) as screen:
        screen.until(at_prompt)
        screen.type_only("/dif")
        screen.keys("Tab")
        screen.until("› /diff")
        screen.keys("C-u")
        screen.type("go")
        screen.until(lambda text: "written" in text and idle(text))
        screen.type_only("look at @no")
        screen.keys("Tab")
        screen.until("look at @notes/")
        screen.type_only("al")
        screen.keys("Tab")
        screen.until("look at @notes/alpha.txt")
        screen.keys("Enter")
        screen.until(lambda text: "read" in text.split("alpha.txt")[-1] and idle(text))
        assert sent(server, admin, project)[-1] == "look at @notes/alpha.txt"
        screen.type_only("/agent tabt")
        screen.keys("Tab")
        screen.until("/agent tabtarget")
        screen.keys("Enter")
        screen.until(lambda text: "tabtarget · idle" in text)
        # Two fit: both are shown.
        screen.type_only("/appro")
        screen.keys("Tab")
        screen.until(lambda text: "/approvals" in text and "/approve" in text)


def test_commands_show_what_the_server_knows(chat, server, admin, project):
    with chat([[call("writer_fs_write", path="kept.txt", content="hello\n"), {"say": "written"}]]) as screen:
        screen.until(at_prompt)
        screen.type("/help")
        text = screen.until(lambda text: "/queue clear forgets them" in " ".join(text.split()) and at_prompt(text))
        # Wrapped at words, whatever the width.
        assert all(word in text.split() for word in ("pasted", "forgets", "message;"))
        for command in ("/agent", "/cancel", "/queue", "/usage", "/approvals", "/files", "/diff", "/clear", "/quit"):
            assert command in screen.history, command
        screen.type("go")
        screen.until(lambda text: "written" in text and idle(text))
        for command, shown in [
            ("/files", "kept.txt"),
            ("/diff", "+hello"),
            ("/usage", "used"),
            ("/approvals", "No call waits for approval."),
            ("/queue", "No message waits."),
            ("/agent", "terminal"),
            ("/nonsense", "there is no command /nonsense"),
        ]:
            screen.type("/clear")
            screen.until(lambda text: at_prompt(text) and len(text.rstrip().splitlines()) <= 4)
            screen.type(command)
            screen.until(lambda text: shown.lower() in text.split(command, 1)[-1].lower() and at_prompt(text))
        screen.type("/end")
        assert screen.wait() == 0
    assert newest(server, admin, project)["status"] == "ended"


def test_a_terminal_without_a_cursor_is_talked_to_in_plain_lines(chat):
    with chat([[{"say": "plain **words**"}]], env={"TERM": "dumb"}) as screen:
        screen.until(PROMPT.strip())
        screen.type("go")
        screen.until("plain **words**")
        screen.type("/quit")
        assert screen.wait() == 0
        assert b"\x1b[" not in screen.written


@pytest.fixture
def busy(server, admin, project):
    """A session with a call that waits for approval, one that runs, one that is idle."""
    server.put_tool("writer", admin, **WRITE)
    server.put_agent("asks", admin, [[call("writer_fs_write", path="a", content="\x1b[2Jx")]], tools={"use": ["writer"], "ask": ["writer_fs_write"]})
    server.put_agent("works", admin, [[{"say": "busy\n"}, {"sleep_ms": 300_000}]])
    server.put_agent("rests", admin, [[{"say": "done"}]])
    sessions = {}
    for agent in ("asks", "works", "rests"):
        sessions[agent] = server.api("session_message", admin, message=f"{agent} now\x1b[2J", project_id=project, agent=agent)["session_id"]
    for agent, kind in [("asks", "approval_requested"), ("works", "message"), ("rests", "turn_completed")]:
        with server.events(sessions[agent], admin) as events:
            events.until(kind)
    yield sessions
    for id in sessions.values():
        server.api("session_end", admin, session_id=id)


def test_top_shows_sessions_calls_approvals_and_servers_live(server, admin, project, busy):
    with Screen(server, "top", "--interval", "1", columns=120, rows=40) as screen:
        text = screen.until(lambda text: "CALLS IN PROGRESS 1" in text)
        assert "waiting    asks" in text and "running    works" in text and "idle       rests" in text
        assert "APPROVALS WAITING 1" in text and "writer_fs_write" in text and "● green" in text and "writer" in text
        [approval] = server.api("approval_list", admin, session_id=busy["asks"], status="pending")["approvals"]
        assert approval["approval_id"] in text
        [known] = server.api("server_list", admin)["servers"]
        assert "SERVERS 1" in text and known["address"] in text and known["server_id"] in text
        # It follows what happens.
        server.api("approval_decide", admin, approval_id=approval["approval_id"], decision="allow")
        screen.until(lambda text: "APPROVALS WAITING 0" in text and "CALLS IN PROGRESS 0" in text and "idle       asks" in text)
        # Keys: filter, select, open, back, sort.
        screen.keys("/")
        screen.type("works")
        screen.until(lambda text: "filter: works" in text and "rests" not in text)
        screen.keys("Down")
        screen.until("› running")
        screen.keys("Enter")
        screen.until(lambda text: "user: works now[2J" in text and "Esc back" in text)
        screen.keys("Escape")
        screen.until("SESSIONS by state")
        screen.keys("Escape")
        screen.until("rests")
        screen.keys("s")
        screen.until("SESSIONS by age")
        for columns, rows in [(60, 16), (140, 45), (40, 10)]:
            screen.resize(columns, rows)
            text = screen.until(lambda text: "q quit" in text or "↑↓ select" in text)
            assert len(text.splitlines()) <= rows and max(len(line) for line in text.splitlines()) <= columns
        screen.keys("q")
        assert screen.wait() == 0
        assert b"\x1b[2J" not in screen.written


def test_top_shows_ended_sessions_when_asked_and_survives_a_server_that_is_gone(server, admin, project):
    server.put_agent("over", admin, [[{"say": "done"}]])
    id = server.api("session_message", admin, message="go", project_id=project, agent="over", wait=True)["session_id"]
    server.api("session_end", admin, session_id=id)
    with Screen(server, "top", "--interval", "1", columns=120, rows=40) as screen:
        screen.until(lambda text: "SESSIONS by state" in text and "ended      over" not in text)
        screen.keys("a")
        screen.until("ended      over")
        screen.keys("C-c")
        assert screen.wait() == 0
    with running() as other:
        with Screen(other, "top", "--interval", "1", columns=120, rows=40) as screen:
            screen.until("SESSIONS by state")
            other.stop()
            screen.until("what is shown is old")
            other.start()
            screen.until(lambda text: "what is shown is old" not in text and "SESSIONS by state" in text)
            screen.keys("q")
            assert screen.wait() == 0


def test_top_prints_one_frame_for_scripts(server, admin, project, busy):
    for args in (["top"], ["top", "--once"]):
        shown = server.cli(*args).stdout
        assert busy["works"] in shown and "APPROVALS WAITING 1" in shown and "\x1b" not in shown
    [snapshot] = server.cli_json("top")["servers"]
    states = {row["session_id"]: row["state"] for row in snapshot["sessions"]}
    assert [states[busy[agent]] for agent in ("asks", "works", "rests")] == ["waiting", "running", "idle"]
    assert [call["tool"] for call in snapshot["calls"] if call["session_id"] == busy["asks"]] == ["writer_fs_write"]
    assert snapshot["tool_servers"][0]["status"] == "green"
    [member] = snapshot["members"]
    assert member["address"] == server.url and member["sessions"] >= 3
    elsewhere = server.cli("--url", server.url, "top", "--json", env={**os.environ, "OUBLIETTE_TOKEN": admin})
    assert busy["works"] in elsewhere.stdout


def test_top_refuses_what_it_cannot_do(server):
    assert server.cli("top", "--interval", "0", check=False).returncode == 2
