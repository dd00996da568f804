//! `shell_exec`: one command in a sandbox of its own, on the session's workspace, without network.

use std::{collections::BTreeMap, time::Instant};

use oubliette_protocol::{Error, Result, agent::check_env_value, id::quoted, tool::CallResult};
use oubliette_sandbox::{RunningSandbox, SandboxError, SandboxExit, SandboxNetwork, SandboxSpec, spec::PATH};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::CallContext;

use super::{
    BuiltinSetup,
    beneath::{self, WorkspaceRoot},
    capture::{DrainEnd, MAX_OUTPUT_BYTES, OutputCapture, drain},
    command_policy::{CommandPolicy, MAX_BYTES, MAX_WORDS},
    object_schema,
    path::{AllowedPaths, PathInWorkspace},
    run_blocking,
};

const MAX_STDIN: usize = 4 * 1024 * 1024;
const MAX_ENV: usize = 128 * 1024;
/// How many bytes of the output's end a timeout error quotes, of each stream.
const TIMEOUT_TAIL_BYTES: usize = 2_000;

/// The arguments of a call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShellExecArguments {
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
            "description": format!("The command and its arguments, one word each; at most {MAX_WORDS} words and {MAX_BYTES} bytes in all."),
        },
        "cwd": { "type": "string", "description": "Working directory beneath /workspace; /workspace when absent." },
        "stdin": {
            "type": "string",
            "description": format!("What the command reads on stdin, at most {MAX_STDIN} bytes; nothing when absent."),
        },
    });
    if !env.is_empty() {
        let names: serde_json::Map<String, Value> = env
            .iter()
            .map(|name| (name.clone(), json!({ "type": "string" })))
            .collect();
        properties["env"] = json!({
            "type": "object", "properties": names, "additionalProperties": false,
            "description": format!("Environment variables to set, at most {MAX_ENV} bytes each; none when absent."),
        });
    }
    object_schema(properties, &["argv"])
}

pub(super) async fn run(
    setup: &BuiltinSetup,
    policy: &CommandPolicy,
    arguments: ShellExecArguments,
    ctx: &CallContext,
) -> Result<CallResult> {
    let argv = policy.admit(&arguments.argv)?;
    let env = environment(policy, arguments.env)?;
    let stdin = arguments.stdin.unwrap_or_default().into_bytes();
    if stdin.len() > MAX_STDIN {
        return Err(Error::limit_exceeded(format!(
            "stdin is larger than {MAX_STDIN} bytes"
        )));
    }
    let cwd = working_directory(setup, arguments.cwd.as_deref()).await?;
    let mut spec = SandboxSpec::new(setup.label.clone(), argv);
    spec.workspace = Some(setup.workspace.clone());
    spec.env = env;
    spec.network = SandboxNetwork::None;
    spec.limits = setup.limits.clone();
    spec.group = setup.group.clone();
    spec.cwd = cwd.into();

    let started = Instant::now();
    let starting = tokio::time::timeout(policy.timeout, setup.sandbox.spawn(spec));
    let running = tokio::select! {
        biased;
        () = ctx.cancel.cancelled() => return Err(cancelled()),
        started = starting => started.map_err(|_| timed_out(policy, ""))?.map_err(spawn_error)?,
    };
    let mut output = ShellOutput::default();
    let handle = running.handle.clone();
    let ended = tokio::select! {
        biased;
        () = ctx.cancel.cancelled() => CommandEnd::Cancelled,
        () = tokio::time::sleep(policy.timeout.saturating_sub(started.elapsed())) => CommandEnd::Timeout,
        stop = output.run_to_end(running, stdin) => stop,
    };
    let exit = match ended {
        CommandEnd::Exited(exit) => exit,
        // The whole process tree is dead before the call is answered.
        stop => {
            handle.kill();
            handle.wait().await;
            return Err(match stop {
                CommandEnd::Cancelled => cancelled(),
                CommandEnd::OutputLimit => Error::limit_exceeded(format!(
                    "the command wrote more than {MAX_OUTPUT_BYTES} bytes and was killed"
                )),
                CommandEnd::Exited(_) | CommandEnd::Timeout => timed_out(policy, &output.tail_text()),
            });
        }
    };
    Ok(output.result(&exit, started))
}

/// How a command ended, or why it is to be killed.
enum CommandEnd {
    Exited(SandboxExit),
    Timeout,
    OutputLimit,
    Cancelled,
}

/// What a command has written so far.
#[derive(Default)]
struct ShellOutput {
    stdout: OutputCapture,
    stderr: OutputCapture,
}

impl ShellOutput {
    /// Writes a command's stdin and captures its output until it has exited and both streams have ended.
    async fn run_to_end(&mut self, running: RunningSandbox, stdin: Vec<u8>) -> CommandEnd {
        let RunningSandbox {
            stdin: mut into,
            stdout,
            stderr,
            handle,
            ..
        } = running;
        let feed = async move {
            // A command may exit or close stdin without reading it: that is not an error.
            let _ = into.write_all(&stdin).await;
            let _ = into.shutdown().await;
            drop(into);
        };
        let exit = async {
            let exit = handle.wait().await;
            // Processes that it left behind would keep the pipes open, so they are killed with it.
            handle.kill();
            exit
        };
        let (out, err) = (drain(stdout, &mut self.stdout), drain(stderr, &mut self.stderr));
        let output = async {
            tokio::pin!(out, err);
            tokio::select! {
                ended = &mut out => if ended == DrainEnd::LimitExceeded { ended } else { err.await },
                ended = &mut err => if ended == DrainEnd::LimitExceeded { ended } else { out.await },
            }
        };
        tokio::pin!(feed, exit, output);
        let (mut fed, mut ended, mut over) = (false, None, false);
        loop {
            tokio::select! {
                () = &mut feed, if !fed => fed = true,
                done = &mut exit, if ended.is_none() => ended = Some(done),
                how = &mut output, if !over => match how {
                    DrainEnd::LimitExceeded => return CommandEnd::OutputLimit,
                    DrainEnd::Stream => over = true,
                },
            }
            if over && let Some(exit) = ended.take() {
                return CommandEnd::Exited(exit);
            }
        }
    }

    fn tail_text(&self) -> String {
        let (out, err) = (
            self.stdout.tail_text(TIMEOUT_TAIL_BYTES),
            self.stderr.tail_text(TIMEOUT_TAIL_BYTES),
        );
        [out, err]
            .into_iter()
            .filter(|text| !text.is_empty())
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn result(&self, exit: &SandboxExit, started: Instant) -> CallResult {
        let (stdout, stderr) = (self.stdout.text(), self.stderr.text());
        let truncated = self.stdout.omitted_bytes() + self.stderr.omitted_bytes() > 0;
        let how = match (exit.code, exit.signal) {
            (Some(0), _) => None,
            _ if exit.oom => Some("killed: the session used more memory than its limit".to_owned()),
            _ if exit.too_many_processes => {
                Some("killed: the session had more processes than its limit".to_owned())
            }
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

/// The environment of a command: the variables of the call that the policy lets it set, and a fixed `PATH`.
fn environment(policy: &CommandPolicy, requested: BTreeMap<String, String>) -> Result<Vec<(String, String)>> {
    let mut env = Vec::with_capacity(requested.len() + 1);
    for (name, value) in requested {
        if name == "PATH" || !policy.env.contains(&name) {
            let why = format!(
                "the policy does not let a call set {} in the environment",
                quoted(&name)
            );
            return Err(Error::not_allowed(why));
        }
        check_env_value(&value, MAX_ENV).map_err(|why| Error::invalid(format!("env.{name} {why}")))?;
        env.push((name, value));
    }
    env.push(("PATH".into(), PATH.into()));
    Ok(env)
}

/// Checks that the working directory exists beneath the workspace, and returns its path in the sandbox. If it is
/// replaced by a link after this check, the sandbox still confines the command.
async fn working_directory(setup: &BuiltinSetup, cwd: Option<&str>) -> Result<String> {
    let parts = PathInWorkspace::parse(cwd.unwrap_or("."))?;
    let (workspace, inside) = (setup.workspace.clone(), parts.sandbox_path());
    let look = move || {
        let everything = AllowedPaths::new(&[".".into()]);
        let root = WorkspaceRoot::open(&workspace)?;
        root.try_allowed_paths(&everything, &parts, beneath::open_directory, |location| {
            let flags = beneath::DIRECTORY;
            Ok(beneath::open(
                &location.base,
                location.rest,
                flags,
                rustix::fs::Mode::empty(),
                location.links,
            )?)
        })
    };
    run_blocking(look).await?;
    Ok(inside)
}

fn spawn_error(error: SandboxError) -> Error {
    match error {
        SandboxError::Program { .. } => Error::not_found(error.to_string()),
        SandboxError::LimitExceeded(why) => Error::limit_exceeded(why),
        SandboxError::Unavailable { .. } | SandboxError::Invalid(_) | SandboxError::Setup(_) => {
            Error::unavailable("the command could not be started in a sandbox").with_cause(error)
        }
    }
}

fn timed_out(policy: &CommandPolicy, output: &str) -> Error {
    let after = policy.timeout.as_millis();
    let output = if output.is_empty() {
        String::new()
    } else {
        format!("; its last output:\n{output}")
    };
    Error::timeout(format!("the command was killed after {after} ms{output}"))
}

fn cancelled() -> Error {
    Error::unavailable("the command was cancelled and killed")
}
