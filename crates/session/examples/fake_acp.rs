//! A scriptable ACP agent for tests, which can also misbehave. The same program is the sandbox's inner
//! stage (`sandbox-init`).
//!
//! The first argument selects how it starts: `mute` answers nothing, `dies` exits, `rubbish` writes lines
//! that are not JSON, `flood` writes one endless line; any other is its name. A prompt's first word selects
//! what the turn does.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    missing_docs
)]

use std::io::{BufRead, Write};

use serde_json::{Value, json};

fn main() {
    let mut args = std::env::args_os().skip(1).peekable();
    if args.peek().is_some_and(|arg| arg == "sandbox-init") {
        args.next();
        oubliette_sandbox::inner::main(args)
    }
    let how = args
        .next()
        .map(|how| how.to_string_lossy().into_owned())
        .unwrap_or_default();
    match how.as_str() {
        "mute" => std::thread::sleep(std::time::Duration::from_secs(600)),
        "dies" => {
            eprintln!("oops, no licence");
            std::process::exit(3);
        }
        "rubbish" => loop {
            println!("this is not json");
        },
        "flood" => {
            let block = vec![b'x'; 1 << 16];
            while std::io::stdout().write_all(&block).is_ok() {}
        }
        _ => FakeAgent {
            name: how,
            asked: 0,
            history: Vec::new(),
            blocks: Vec::new(),
        }
        .serve(),
    }
}

struct FakeAgent {
    name: String,
    asked: u64,
    history: Vec<Value>,
    blocks: Vec<String>,
}

impl FakeAgent {
    fn serve(&mut self) {
        while let Some(message) = read() {
            let (id, method) = (
                message["id"].clone(),
                message["method"].as_str().unwrap_or("").to_owned(),
            );
            match method.as_str() {
                "initialize" => answer(
                    &id,
                    json!({"protocolVersion":1,"agentCapabilities":{"loadSession":true}}),
                ),
                "session/new" => {
                    self.history.push(message["params"].clone());
                    answer(&id, json!({"sessionId":format!("conv-{}", std::process::id())}));
                }
                "session/load" => {
                    // Agents replay history on load; the server must not log it again.
                    update(
                        json!({"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"OLD"}}),
                    );
                    self.history.push(message["params"].clone());
                    answer(&id, Value::Null);
                }
                "session/prompt" => {
                    // The last block is the message; instructions come before it.
                    let blocks = message["params"]["prompt"].as_array().unwrap();
                    self.blocks = blocks
                        .iter()
                        .map(|block| block["text"].as_str().unwrap().to_owned())
                        .collect();
                    let text = self.blocks.last().cloned().unwrap_or_default();
                    self.turn(&id, &message["params"]["sessionId"], &text);
                }
                _ => {}
            }
        }
    }

    fn turn(&mut self, id: &Value, session: &Value, text: &str) {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        let stop = |reason: &str| answer(id, json!({ "stopReason": reason }));
        match word {
            "say" => {
                for piece in rest.split_inclusive(' ') {
                    say(session, piece);
                }
                stop("end_turn");
            }
            "name" => {
                say(session, &self.name);
                stop("end_turn");
            }
            "loaded" => {
                say(session, self.history[0]["sessionId"].as_str().unwrap_or("new"));
                stop("end_turn");
            }
            "blocks" | "/blocks" => {
                say(session, &self.blocks.join("|"));
                stop("end_turn");
            }
            "env" => {
                say(session, &std::env::var(rest).unwrap_or_else(|_| "unset".into()));
                stop("end_turn");
            }
            "client" => {
                say(session, &self.history[0]["mcpServers"].to_string());
                stop("end_turn");
            }
            "tool" => {
                say(session, "before");
                for step in [
                    json!({"sessionUpdate":"tool_call","toolCallId":"c1","title":"reading","name":"read","rawInput":{"path":"x"},"status":"in_progress"}),
                    json!({"sessionUpdate":"tool_call_update","toolCallId":"c1","status":"completed","rawOutput":{"text":"y"}}),
                ] {
                    update_in(session, step);
                }
                say(session, "after");
                stop("end_turn");
            }
            // A tool result of `rest` bytes, reported in one line.
            "result" => {
                let text = "x".repeat(rest.parse().unwrap());
                let done = json!({"sessionUpdate":"tool_call_update","toolCallId":"c1","title":"reading",
                    "status":"completed","rawOutput":{"text":text}});
                update_in(session, done);
                stop("end_turn");
            }
            "wait" => {
                say(session, "waiting");
                while let Some(message) = read() {
                    if message["method"] == "session/cancel" {
                        return stop("cancelled");
                    }
                }
            }
            "ignore" => {
                say(session, "ignoring");
                while read().is_some() {}
            }
            "permission" => {
                let options = json!([{"optionId":"yes","name":"y","kind":"allow_once"},{"optionId":"no","name":"n","kind":"reject_once"}]);
                let got = self.ask(
                    "session/request_permission",
                    json!({"sessionId":session,"toolCall":{"toolCallId":"c"},"options":options}),
                );
                say(
                    session,
                    got["result"]["outcome"]["optionId"]
                        .as_str()
                        .unwrap_or("cancelled"),
                );
                stop("end_turn");
            }
            "remember" => {
                self.ask("_oubliette/memory/append", json!({"entries":[{"text":rest}]}));
                let got = self.ask("_oubliette/memory/load", json!({}));
                let known: Vec<&str> = got["result"]["entries"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|e| e["text"].as_str().unwrap())
                    .collect();
                say(session, &known.join(","));
                stop("end_turn");
            }
            "fs" => {
                let got = self.ask(
                    "fs/read_text_file",
                    json!({"sessionId":session,"path":"/etc/passwd"}),
                );
                say(session, &got["error"]["code"].to_string());
                stop("end_turn");
            }
            "fill" => {
                let block = vec![b'x'; 1 << 20];
                let mut file = std::fs::File::create("big").unwrap();
                for _ in 0..rest.parse::<usize>().unwrap() {
                    file.write_all(&block).unwrap();
                }
                self.turn(id, session, "wait");
            }
            "chatter" => loop {
                say(session, "x");
            },
            "rubbish" => loop {
                println!("{{ not json");
            },
            "fail" => send(
                json!({"jsonrpc":"2.0","id":id,"error":{"code":-32000,"message":"no model","data":{"details":"configure one"}}}),
            ),
            "die" => {
                eprintln!("segmentation fault, of course");
                std::process::exit(7);
            }
            _ => stop("end_turn"),
        }
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let id = format!("a{}", self.asked);
        send(json!({"jsonrpc":"2.0","id":id,"method":method,"params":params}));
        loop {
            let message = read().unwrap();
            if message["id"] == json!(id) {
                return message;
            }
        }
    }
}

fn read() -> Option<Value> {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(1..) => Some(serde_json::from_str(&line).unwrap()),
        _ => None,
    }
}

fn send(message: Value) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{message}").and_then(|()| out.flush()).is_err() {
        std::process::exit(0);
    }
}

fn answer(id: &Value, result: Value) {
    send(json!({"jsonrpc":"2.0","id":id,"result":result}));
}

fn update(update: Value) {
    update_in(&json!("old"), update);
}

fn update_in(session: &Value, update: Value) {
    send(json!({"jsonrpc":"2.0","method":"session/update","params":{"sessionId":session,"update":update}}));
}

fn say(session: &Value, text: &str) {
    update_in(
        session,
        json!({"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":text}}),
    );
}
