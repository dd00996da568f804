//! `shell_exec`: one command in a sandbox of its own, on the session's workspace, without network.

use std::{collections::BTreeMap, time::Instant};

use oubliette_protocol::{Error, Result, id::quoted, tool::CallResult};
use oubliette_sandbox::{Exit, Network, Running, SandboxError, Spec, spec::PATH};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::CallContext;

use super::{
    Place,
    beneath::{self, Root},
    capture::{Capture, Ended, FLOOD, drain},
    object_schema,
    path::{Allowed, Parts},
    words::Commands,
};

const MAX_STDIN: usize = 4 * 1024 * 1024;
const MAX_ENV: usize = 128 * 1024;
/// Of what a command said, in the error when it ran out of time.
const LAST_WORDS: usize = 2_000;

/// What a call asks for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    argv: Vec<String>,
    #[serde(default)]
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    stdin: Option<String>,
}

pub(super) fn schema(env: &[String]) -> Value {
    let mut properties = json!({
        "argv": {
            "type": "array", "items": { "type": "string" }, "minItems": 1,
            "description": "The command and its arguments, one word each.",
        },
        "cwd": { "type": "string", "description": "Working directory beneath /workspace; /workspace when absent." },
        "stdin": { "type": "string", "description": "What the command reads; nothing when absent." },
    });
    if !env.is_empty() {
        let names: serde_json::Map<String, Value> = env
            .iter()
            .map(|name| (name.clone(), json!({ "type": "string" })))
            .collect();
        properties["env"] = json!({ "type": "object", "properties": names, "additionalProperties": false });
    }
    object_schema(properties, &["argv"])
}

pub(super) async fn run(
    place: &Place,
    commands: &Commands,
    asked: Asked,
    ctx: &CallContext,
) -> Result<CallResult> {
    let argv = commands.admit(&asked.argv)?;
    let env = environment(commands, asked.env)?;
    let stdin = asked.stdin.unwrap_or_default().into_bytes();
    if stdin.len() > MAX_STDIN {
        return Err(Error::limit_exceeded(format!(
            "stdin is larger than {MAX_STDIN} bytes"
        )));
    }
    let cwd = directory(place, asked.cwd.as_deref()).await?;
    let mut spec = Spec::new(place.label.clone(), argv);
    spec.workspace = Some(place.workspace.clone());
    spec.env = env;
    spec.network = Network::None;
    spec.limits = place.limits.clone();
    spec.cwd = cwd.into();

    let started = Instant::now();
    let starting = tokio::time::timeout(commands.timeout, place.sandbox.spawn(spec));
    let running = tokio::select! {
        biased;
        () = ctx.cancel.cancelled() => return Err(cancelled()),
        started = starting => started.map_err(|_| timed_out(commands, ""))?.map_err(refused)?,
    };
    let mut said = Said::default();
    let handle = running.handle.clone();
    let ended = tokio::select! {
        biased;
        () = ctx.cancel.cancelled() => Stop::Cancelled,
        () = tokio::time::sleep(commands.timeout.saturating_sub(started.elapsed())) => Stop::Timeout,
        stop = said.follow(running, stdin) => stop,
    };
    let exit = match ended {
        Stop::Exited(exit) => exit,
        // The whole tree dies before whoever asked is answered.
        stop => {
            handle.kill();
            handle.wait().await;
            return Err(match stop {
                Stop::Cancelled => cancelled(),
                Stop::Flood => {
                    Error::limit_exceeded(format!("the command said more than {FLOOD} bytes and was killed"))
                }
                Stop::Exited(_) | Stop::Timeout => timed_out(commands, &said.last_words()),
            });
        }
    };
    Ok(said.result(&exit, started))
}

/// Why nothing more is read of a command.
enum Stop {
    Exited(Exit),
    Timeout,
    Flood,
    Cancelled,
}

#[derive(Default)]
struct Said {
    stdout: Capture,
    stderr: Capture,
}

impl Said {
    /// Feeds and reads a command until it has ended.
    async fn follow(&mut self, running: Running, stdin: Vec<u8>) -> Stop {
        let Running {
            stdin: mut into,
            stdout,
            stderr,
            handle,
            ..
        } = running;
        let feed = async move {
            // A command that does not read its input is no fault of anybody's.
            let _ = into.write_all(&stdin).await;
            let _ = into.shutdown().await;
            drop(into);
        };
        let exit = async {
            let exit = handle.wait().await;
            // What it started and left behind would keep the pipes open: it goes with it.
            handle.kill();
            exit
        };
        let (out, err) = (drain(stdout, &mut self.stdout), drain(stderr, &mut self.stderr));
        let said = async {
            tokio::pin!(out, err);
            tokio::select! {
                ended = &mut out => if ended == Ended::Flood { ended } else { err.await },
                ended = &mut err => if ended == Ended::Flood { ended } else { out.await },
            }
        };
        tokio::pin!(feed, exit, said);
        let (mut fed, mut ended, mut over) = (false, None, false);
        loop {
            tokio::select! {
                () = &mut feed, if !fed => fed = true,
                done = &mut exit, if ended.is_none() => ended = Some(done),
                how = &mut said, if !over => match how {
                    Ended::Flood => return Stop::Flood,
                    Ended::Stream => over = true,
                },
            }
            if over && let Some(exit) = ended.take() {
                return Stop::Exited(exit);
            }
        }
    }

    fn last_words(&self) -> String {
        let (out, err) = (self.stdout.end(LAST_WORDS), self.stderr.end(LAST_WORDS));
        [out, err]
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn result(&self, exit: &Exit, started: Instant) -> CallResult {
        let (stdout, stderr) = (self.stdout.text(), self.stderr.text());
        let truncated = self.stdout.left_out() + self.stderr.left_out() > 0;
        let how = match (exit.code, exit.signal) {
            (Some(0), _) => None,
            _ if exit.oom => Some("killed: it used more memory than its limit".to_owned()),
            (Some(code), _) => Some(format!("exit code {code}")),
            (None, Some(signal)) => Some(format!("killed by signal {signal}")),
            (None, None) => Some("ended without an exit code".to_owned()),
        };
        let mut text = stdout.clone();
        for (label, part) in [("stderr", Some(&stderr)), ("", how.as_ref())] {
            if let Some(part) = part.filter(|part| !part.is_empty()) {
                if !text.is_empty() && !text.ends_with('\n') {
                    text.push('\n');
                }
                text.push_str(&if label.is_empty() {
                    format!("[{part}]")
                } else {
                    format!("[{label}]\n{part}")
                });
            }
        }
        CallResult {
            structured_content: Some(json!({
                "exit_code": exit.code, "signal": exit.signal, "stdout": stdout, "stderr": stderr,
                "truncated": truncated, "duration_ms": started.elapsed().as_secs_f64() * 1_000.0,
            })),
            is_error: exit.code != Some(0),
            ..CallResult::text(text)
        }
    }
}

fn environment(commands: &Commands, asked: BTreeMap<String, String>) -> Result<Vec<(String, String)>> {
    let mut env = Vec::with_capacity(asked.len() + 1);
    for (name, value) in asked {
        if name == "PATH" || !commands.env.contains(&name) {
            let why = format!(
                "the policy does not let a call set {} in the environment",
                quoted(&name)
            );
            return Err(Error::not_allowed(why));
        }
        if value.contains('\0') || value.len() > MAX_ENV {
            return Err(Error::invalid(format!(
                "env.{name} must hold no NUL and at most {MAX_ENV} bytes"
            )));
        }
        env.push((name, value));
    }
    env.push(("PATH".into(), PATH.into()));
    Ok(env)
}

/// The working directory, if it is one beneath the workspace. That it stays one is for the sandbox.
async fn directory(place: &Place, cwd: Option<&str>) -> Result<String> {
    let parts = Parts::read(cwd.unwrap_or("."))?;
    let (workspace, inside) = (place.workspace.clone(), parts.inside());
    let look = move || {
        let everything = Allowed::new(&[".".into()]);
        let root = Root::open(&workspace)?;
        root.within(&everything, &parts, beneath::existing, |spot| {
            let flags = beneath::DIRECTORY;
            Ok(beneath::open(
                &spot.base,
                spot.rest,
                flags,
                rustix::fs::Mode::empty(),
                spot.links,
            )?)
        })
    };
    tokio::task::spawn_blocking(look)
        .await
        .map_err(Error::internal)??;
    Ok(inside)
}

fn refused(error: SandboxError) -> Error {
    match error {
        SandboxError::Program { .. } => Error::not_found(error.to_string()),
        SandboxError::Unavailable { .. } | SandboxError::Invalid(_) | SandboxError::Setup(_) => {
            Error::unavailable("the command could not be started in a sandbox").with_log(error)
        }
    }
}

fn timed_out(commands: &Commands, said: &str) -> Error {
    let after = commands.timeout.as_millis();
    let said = if said.is_empty() {
        String::new()
    } else {
        format!("; the last it said:\n{said}")
    };
    Error::timeout(format!("the command was killed after {after} ms{said}"))
}

fn cancelled() -> Error {
    Error::unavailable("the command was cancelled and killed")
}
