//! The command line with a running server: turns are shown, followed and cancelled, agents switched.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli_support;

use cli_support::CliHome;
use serde_json::{Value, json};

fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

#[test]
fn run_shows_text_tool_calls_and_results() {
    let home = CliHome::with_server();
    let said = home
        .run(&["run", "--agent", "demo", "Show me around"])
        .expect_success();
    for words in [
        "Hello. I am a scripted agent",
        "▸ write path=\"hello.txt\"",
        "✓ created /workspace/hello.txt",
        "Done.",
    ] {
        assert!(said.stdout.contains(words), "{words}: {said:?}");
    }
    assert!(!said.stdout.contains('\u{1b}'), "no colour in a pipe");
    assert!(
        said.stderr.contains("oubliette chat --session gogol_"),
        "{said:?}"
    );

    let reply = home.json(&["run", "--agent", "demo", "again", "--end"]);
    assert_eq!((&reply["turn"], &reply["status"]), (&json!(1), &json!("idle")));
    assert!(reply["text"].as_str().unwrap().starts_with("Hello."));
    assert_eq!(
        home.json(&["session", "get", reply["session_id"].as_str().unwrap()])["status"],
        "ended"
    );

    let words = home
        .run_with_stdin(&["run", "--quiet", "--agent", "demo", "-"], "from stdin")
        .expect_success();
    assert!(
        words.stdout.starts_with("Hello.") && !words.stdout.contains('▸') && words.stderr.is_empty(),
        "{words:?}"
    );
    let heard = lines(
        &home
            .run(&["session", "events", "last", "--json"])
            .expect_success()
            .stdout,
    );
    assert!(
        heard[0]["events"]
            .as_array()
            .unwrap()
            .iter()
            .any(|e| e["text"] == "from stdin")
    );

    let events = lines(
        &home
            .run(&["run", "--stream-json", "--session", "last", "more"])
            .expect_success()
            .stdout,
    );
    assert_eq!(events.last().unwrap()["type"], "turn_completed");
    assert_eq!(events.last().unwrap()["turn"], 2);
    assert!(
        events.iter().all(|e| e["text"] != "from stdin"),
        "what was before is not shown again"
    );
}

#[test]
fn run_exits_with_1_when_the_turn_fails() {
    let home = CliHome::with_server();
    let runtime =
        json!({ "name": "B", "prompt": "p", "runtime": { "kind": "acp", "command": ["/bin/false"] } })
            .to_string();
    home.run_with_stdin(&["agent", "put", "-", "--slug", "broken"], &runtime)
        .expect_success();
    let said = home.run(&["run", "--agent", "broken", "go"]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.contains("error: "), "{said:?}");
    assert_eq!(
        home.run(&["run", "--agent", "broken", "go", "--json"])
            .expect_error_code(),
        "unavailable"
    );
    let streamed = home.run(&["run", "--agent", "broken", "go", "--stream-json"]);
    assert_eq!(streamed.code, 1);
    assert!(lines(&streamed.stdout).iter().any(|e| e["type"] == "error"));
    assert_eq!(
        home.run(&["run", "--agent", "nobody", "go", "--json"])
            .expect_error_code(),
        "not_found"
    );
    home.run(&["project", "create", "second"]).expect_success();
    assert!(home.run(&["run", "go"]).stderr.contains("--project"));
    home.run(&["run", "--project", "second", "--agent", "demo", "go"])
        .expect_success();
}

/// An ACP agent, as a shell script, that answers a prompt with one chunk of text, never ends the turn and ignores
/// `session/cancel`.
const STUBBORN: &str = r#"
while read -r line; do
    id=${line#*\"id\":}
    case $line in
        *\"method\":\"initialize\"*) result='{"protocolVersion":1,"agentCapabilities":{}}' ;;
        *\"method\":\"session/new\"*) result='{"sessionId":"s"}' ;;
        *\"method\":\"session/prompt\"*)
            said='{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"Begun."}}'
            echo '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":'$said'}}'
            continue ;;
        *) continue ;;
    esac
    echo '{"jsonrpc":"2.0","id":'${id%%[,\}]*}',"result":'$result'}'
done
"#;

#[test]
fn ctrl_c_cancels_the_turn_and_a_second_one_ends_the_session() {
    let home = CliHome::with_server();
    home.put_scripted_agent(
        "slow",
        json!([[{ "say": "Begun." }, { "sleep_ms": 600_000 }, { "say": "never" }]]),
    );

    let mut once = home.start(&["run", "--agent", "slow", "go"]);
    once.wait_for_stdout("Begun.");
    once.interrupt();
    once.wait_for_stderr("Ctrl-C again ends the session");
    let said = once.finish();
    assert_eq!(said.code, 1);
    assert!(
        said.stderr.contains("the turn was cancelled") && !said.stdout.contains("never"),
        "{said:?}"
    );
    assert_eq!(home.json(&["session", "get", "last"])["status"], "idle");

    // This agent ignores the cancellation, so its turn is still running at the second Ctrl-C.
    let runtime = json!({ "kind": "acp", "command": ["/bin/sh", "-c", STUBBORN] });
    let agent = json!({ "name": "S", "prompt": "p", "runtime": runtime }).to_string();
    home.run_with_stdin(&["agent", "put", "-", "--slug", "stubborn"], &agent)
        .expect_success();
    let mut twice = home.start(&["run", "--agent", "stubborn", "go"]);
    twice.wait_for_stdout("Begun.");
    twice.interrupt();
    twice.wait_for_stderr("Ctrl-C again ends the session");
    twice.interrupt();
    assert_eq!(twice.finish().code, 1);
    assert_eq!(home.json(&["session", "get", "last"])["status"], "ended");
}

#[test]
fn chat_runs_several_turns_and_switches_agents() {
    let home = CliHome::with_server();
    home.put_scripted_agent("parrot", json!([[{ "say": "first" }], [{ "say": "second" }]]));
    let said = home.run_with_stdin(
        &["chat", "--agent", "parrot"],
        "hello\n\n/switch demo\ngo\n/switch parrot\nagain\n/tools\n/agents\n/cancel\n/help\n/nonsense\n/end\n",
    );
    assert_eq!(
        said.code, 1,
        "an unknown command in a pipe is a failure: {said:?}"
    );
    assert!(said.stderr.contains("/nonsense"), "{said:?}");
    for words in [
        "first",
        "switch_requested     parrot → demo",
        "teardown_finished",
        "demo works now",
        "▸ write",
        "parrot works now",
        "second",
        "session_message",
        "assistant",
        "/switch AGENT",
    ] {
        assert!(said.stdout.contains(words), "{words}: {}", said.stdout);
    }
    assert!(said.stderr.contains("no turn is running"), "{said:?}");
    assert_eq!(home.json(&["session", "get", "last"])["status"], "ended");

    let replies = lines(
        &home
            .run_with_stdin(&["chat", "--agent", "parrot", "--json"], "one\ntwo\n")
            .expect_success()
            .stdout,
    );
    assert_eq!(
        replies
            .iter()
            .map(|r| r["text"].as_str().unwrap())
            .collect::<Vec<_>>(),
        ["first", "second"]
    );
    let back = home
        .run_with_stdin(&["chat", "--session", "last"], "three\n")
        .expect_success();
    assert!(
        back.stdout.contains("second") && !back.stdout.contains("first"),
        "{back:?}"
    );
}

#[test]
fn sessions_are_listed_messaged_followed_and_ended() {
    let home = CliHome::with_server();
    home.put_scripted_agent("parrot", json!([[{ "say": "first" }], [{ "say": "second" }]]));
    let id = home.json(&["run", "--agent", "parrot", "hello"])["session_id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        home.run(&["session", "list"])
            .expect_success()
            .stdout
            .contains(&id)
    );
    assert_eq!(
        home.json(&["session", "list", "--status", "ended"]),
        json!({ "sessions": [] })
    );

    let mut follower = home.start(&["session", "events", &id, "--follow", "--json"]);
    follower.wait_for_stdout("turn_completed");
    assert!(
        home.run(&["session", "message", &id, "more", "--wait"])
            .expect_success()
            .stdout
            .contains("second")
    );
    let sent = home.json(&["session", "message", &id, "and more"]);
    assert_eq!(sent["turn"], 3);
    let switched = home.json(&["session", "switch", &id, "demo"]);
    assert_eq!(switched["agent"], "demo");
    assert_eq!(home.json(&["session", "cancel", &id])["cancelled"], false);
    home.run(&["session", "end", &id]).expect_success();
    let followed = lines(follower.finish().stdout.trim_start_matches(|c| c != '\n').trim());
    assert_eq!(
        followed.last().unwrap()["status"],
        "ended",
        "following ends with the session"
    );

    let all = home.json(&["session", "events", &id]);
    let indexes: Vec<i64> = all["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["index"].as_i64().unwrap())
        .collect();
    assert_eq!(indexes, (0..indexes.len() as i64).collect::<Vec<_>>());
    let some = home.json(&["session", "events", &id, "--since", "2", "--max", "1"]);
    assert_eq!(some["events"][0]["index"], 3);
    assert!(
        home.run(&["session", "events", &id])
            .expect_success()
            .stdout
            .contains("turn_completed       turn 1 (end_turn)")
    );
    assert_eq!(
        home.run(&["session", "get", "gogol_01ARZ3NDEKTSV4RRFFQ69G5FAV", "--json"])
            .expect_error_code(),
        "not_found"
    );
}

#[test]
fn session_debug_follows_events_with_timings() {
    let home = CliHome::with_server();
    let id = home.json(&["run", "--agent", "demo", "hello"])["session_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let mut follower = home.start(&["session", "debug", &id]);
    let shown = follower.wait_for_stdout("run ls -l");
    assert!(
        shown.contains("build_started") && shown.contains("tool_call") && shown.contains(" ms] →"),
        "{shown}"
    );
    home.run(&["tool", "call", &id, "read", r#"{"path": "hello.txt"}"#])
        .expect_success();
    follower.wait_for_stdout("read path=\"hello.txt\"");
    home.run(&["session", "end", &id]).expect_success();
    assert!(
        follower.finish().stdout.contains("teardown_finished"),
        "it stays to the end and then leaves"
    );
    let calls = lines(
        &home
            .run(&["session", "debug", &id, "--kinds", "tool_call", "--json"])
            .expect_success()
            .stdout,
    );
    assert!(
        calls.len() >= 4 && calls.iter().all(|c| c["kind"] == "tool_call"),
        "{calls:?}"
    );
}

#[test]
fn tools_of_a_session_are_listed_called_and_restarted() {
    let home = CliHome::with_server();
    let id = home.json(&["run", "--agent", "demo", "hello"])["session_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let list = home
        .run(&["tool", "list", "--session", &id])
        .expect_success()
        .stdout;
    assert!(
        list.contains("read ") && list.contains("LIGHT") && list.contains("green"),
        "{list}"
    );
    assert!(
        home.run(&["tool", "list", "--agent", "demo"])
            .expect_success()
            .stdout
            .contains("write")
    );
    assert_eq!(
        home.run(&["tool", "call", &id, "read", r#"{"path": "hello.txt"}"#])
            .expect_success()
            .stdout,
        "Hello from the sandbox.\n"
    );
    let failed = home.run(&[
        "tool",
        "call",
        &id,
        "read",
        r#"{"path": "missing.txt"}"#,
        "--json",
    ]);
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(
        home.run(&["tool", "call", &id, "read", "{"])
            .stderr
            .contains("not JSON")
    );
    assert_eq!(
        home.run(&["tool", "call", &id, "nope", "--json"])
            .expect_error_code(),
        "not_found"
    );
    assert!(
        home.run(&["tool", "restart", &id, "reader"])
            .stderr
            .contains("built-in")
    );
    let told = home
        .run(&["tool", "explain", "demo", "read", "--session", &id])
        .expect_success()
        .stdout;
    assert!(told.contains("demo may call read"), "{told}");
}

#[test]
fn a_running_server_is_found_wherever_it_listens() {
    let home = CliHome::with_server();
    let config = home.json(&["mcp-config", "cursor"]);
    assert_eq!(config["url"], format!("{}/mcp", home.url));
    let report = home.json(&["doctor"]);
    assert_eq!(report["checks"][0]["detail"], format!("running at {}", home.url));
    let second = home.run(&["up", "--json"]);
    assert_eq!(second.expect_error_code(), "conflict");
    assert!(second.stderr.contains(&home.url), "{second:?}");
    let token = home.json(&[
        "token",
        "create",
        "--name",
        "t",
        "--scope",
        "read",
        "--project",
        "sandbox",
    ]);
    assert!(token["project_id"].is_string(), "a project by its name: {token}");
}
