//! The driver of the Rust caller library for `tests/callers/scenarios.json`: commands on stdin, replies and notes on
//! stdout.
#![allow(missing_docs)]

use std::{collections::HashMap, sync::Arc};

use anyhow::{Context as _, Result};
use oubliette_caller::{Error, Lend, Message, Oubliette, Session, Turn};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    sync::{Mutex, watch},
};

/// One command, as `tests/callers/README.md` has them.
#[derive(Deserialize)]
struct Command {
    id: u64,
    caller: String,
    #[serde(rename = "do")]
    name: String,
    #[serde(flatten)]
    arguments: Map<String, Value>,
}

/// One caller: its session, and whether functions that hold may go on.
struct Caller {
    key: String,
    client: Mutex<Option<Oubliette>>,
    session: Mutex<Option<Session>>,
    released: watch::Sender<bool>,
}

/// Notes that a function was stopped, when it is dropped.
struct NoteStop {
    caller: String,
    tool: String,
}

impl Drop for NoteStop {
    fn drop(&mut self) {
        write_line(&json!({ "caller": self.caller, "note": "stopped", "tool": self.tool }));
    }
}

#[allow(clippy::print_stdout, reason = "the driver's output")]
fn write_line(line: &Value) {
    println!("{line}");
}

/// What an error is, in the words of the scenarios.
fn describe_error(error: &Error) -> Value {
    let (kind, code) = match error {
        Error::Refused { code, .. } => ("refused", Some(code)),
        Error::Unreachable(_) => ("unreachable", None),
        Error::Ended(_) => ("ended", None),
        _ => ("other", None),
    };
    json!({ "kind": kind, "code": code, "message": error.to_string() })
}

fn turn_to_json(turn: &Turn) -> Value {
    json!({ "turn": turn.turn, "stop_reason": turn.stop_reason, "text": turn.text })
}

fn text(arguments: &Map<String, Value>, name: &str) -> String {
    arguments[name].as_str().unwrap_or_default().to_owned()
}

impl Caller {
    fn new(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            client: Mutex::default(),
            session: Mutex::default(),
            released: watch::Sender::new(false),
        }
    }

    /// Lends a function that notes each run.
    fn lend(&self, lend: Lend, tool: &str, behaviour: &str) -> Lend {
        let (key, name, behaviour) = (self.key.clone(), tool.to_owned(), behaviour.to_owned());
        let described = format!("Does {behaviour}.");
        let released = self.released.subscribe();
        lend.raw_tool(tool, described, json!({ "type": "object" }), move |arguments| {
            write_line(&json!({ "caller": key, "note": "ran", "tool": name, "arguments": arguments }));
            let (behaviour, mut released) = (behaviour.clone(), released.clone());
            let (caller, tool) = (key.clone(), name.clone());
            async move {
                match behaviour.as_str() {
                    "fail" => Err("not today".to_owned()),
                    "hold" => released
                        .wait_for(|released| *released)
                        .await
                        .map(|_| json!("held"))
                        .map_err(|why| why.to_string()),
                    "hang" => {
                        let _note = NoteStop { caller, tool };
                        std::future::pending().await
                    }
                    _ => Ok(json!({ "echo": arguments })),
                }
            }
        })
    }

    async fn start(&self, arguments: &Map<String, Value>) -> Result<Value, Error> {
        let client = Oubliette::connect(&text(arguments, "url"), text(arguments, "token"))?;
        *self.client.lock().await = Some(client.clone());
        let key = self.key.clone();
        let mut lend = client.lend(text(arguments, "caller_id")).on_event(move |event| {
            write_line(&json!({ "caller": key, "note": "event", "index": event.index, "type": event.kind }));
        });
        for (tool, behaviour) in arguments["tools"].as_object().into_iter().flatten() {
            lend = self.lend(lend, tool, behaviour.as_str().unwrap_or_default());
        }
        let mut message = Message::new(text(arguments, "message"));
        for (name, value) in arguments["options"].as_object().into_iter().flatten() {
            message = message.with(name, value.clone());
        }
        let session = lend.start(message).await?;
        let reply = json!({ "session_id": session.id(), "turn": session.last_turn() });
        *self.session.lock().await = Some(session);
        Ok(reply)
    }

    async fn run(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, Error> {
        match name {
            "start" => return self.start(arguments).await,
            "release" => {
                self.released.send_replace(true);
                return Ok(json!({}));
            }
            _ => {}
        }
        let mut slot = self.session.lock().await;
        let no_session = || Error::Invalid("this caller has no session".into());
        match name {
            "withdraw" => {
                let session = slot.take().ok_or_else(no_session)?;
                session.withdraw(text(arguments, "message")).await?;
                return Ok(json!({}));
            }
            "stop" => {
                *slot = None;
                return Ok(json!({}));
            }
            _ => {}
        }
        let session = slot.as_mut().ok_or_else(no_session)?;
        match name {
            "turn" => {
                let number = arguments["number"].as_u64().unwrap_or_default();
                return session.turn(number).await.map(|turn| turn_to_json(&turn));
            }
            "ask" => {
                let turn = session.ask(text(arguments, "message")).await?;
                return Ok(turn_to_json(&turn));
            }
            "message" => drop(session.message(text(arguments, "message")).await?),
            "ended" => drop(session.ended().await),
            // Not `Session::end`, which takes the handle: the scenario hears the end.
            "end" => {
                let client = self.client.lock().await.clone().ok_or_else(no_session)?;
                client
                    .call("session_end", &json!({ "session_id": session.id() }))
                    .await?;
            }
            other => return Err(Error::Invalid(format!("no command {other}"))),
        }
        Ok(json!({}))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut callers: HashMap<String, Arc<Caller>> = HashMap::new();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let command: Command = serde_json::from_str(&line).context("not a command")?;
        let new = || Arc::new(Caller::new(&command.caller));
        let caller = callers.entry(command.caller.clone()).or_insert_with(new).clone();
        tokio::spawn(async move {
            let reply = match caller.run(&command.name, &command.arguments).await {
                Ok(ok) => json!({ "id": command.id, "ok": ok }),
                Err(error) => json!({ "id": command.id, "error": describe_error(&error) }),
            };
            write_line(&reply);
        });
    }
    Ok(())
}
