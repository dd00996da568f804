//! An ACP agent whose answer is the time at which the first byte of `initialize` reached it.

use std::io::{BufRead, Read, Write};

use anyhow::Result;
use serde_json::{Value, json};

use crate::clock;

pub(crate) fn run() -> Result<()> {
    let mut first = [0];
    let mut input = std::io::stdin().lock();
    input.read_exact(&mut first)?;
    let at = clock::now();
    let mut line = vec![first[0]];
    loop {
        if input.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let message: Value = serde_json::from_slice(&line)?;
        line.clear();
        let params = &message["params"];
        let result = match message["method"].as_str() {
            Some("initialize") => json!({"protocolVersion": 1, "agentCapabilities": {}}),
            Some("session/new") => json!({"sessionId": "one"}),
            Some("session/prompt") => {
                let content = json!({"type": "text", "text": at.to_string()});
                let update = json!({"sessionUpdate": "agent_message_chunk", "content": content});
                write_message(&json!({"jsonrpc": "2.0", "method": "session/update",
                            "params": {"sessionId": params["sessionId"], "update": update}}))?;
                json!({"stopReason": "end_turn"})
            }
            _ => continue,
        };
        write_message(&json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))?;
    }
}

fn write_message(message: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{message}")?;
    Ok(out.flush()?)
}
