//! Programs: what it costs to start a real agent and a real tool server from an installed package, beside the same
//! programs started bare on the host. Their packages come from the registries that npm is configured for.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdout, Command},
};

use super::BenchEffort;
use crate::{
    baseline::rmcp_client,
    clock,
    home::{BenchHome, RestClient, own_program, text_field},
    report::{BenchReport, BenchTarget},
    stats::TimingSamples,
};

const NAME: &str = "programs";
/// The real tool server.
const TOOL_SERVER: &str = "@modelcontextprotocol/server-everything";
/// The preset of the real agent: it opens a conversation without asking its model.
const AGENT_PRESET: &str = "codex";

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    Box::pin(measure_tool_server(report, effort)).await?;
    Box::pin(measure_agent(report, effort)).await
}

/// Starts a tool server as a program, as a command in a sandbox, and bare on the host.
async fn measure_tool_server(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    // The program as a command needs a copy outside the home, which no sandbox is shown.
    let copies = tempfile::tempdir()?;
    let home = BenchHome::new("").await?;
    let config = home.path().join("oubliette.toml");
    let trusted = std::fs::read_to_string(&config)?.replace(
        "read_only = [",
        &format!("read_only = [{:?}, ", copies.path().display()),
    );
    std::fs::write(&config, trusted)?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let block = json!({"mcpServers": {"program": {"command": "npx", "args": ["-y", TOOL_SERVER, "stdio"]}}});
    rest.call_tool("tool_add", json!({ "servers": block })).await?;
    let argv = installed_argv(&home, &mut rest, TOOL_SERVER, None).await?;
    let tree = home.path().join("programs");
    let copied = Command::new("cp")
        .arg("-a")
        .args([&tree, copies.path()])
        .status()
        .await?;
    ensure!(copied.success(), "the programs could not be copied");
    let copy = |argument: &String| {
        argument.replace(
            &tree.display().to_string(),
            &copies.path().join("programs").display().to_string(),
        )
    };
    let mut arguments: Vec<String> = argv[1..].iter().map(copy).collect();
    arguments.push("stdio".to_owned());
    let command = json!({"id": "command", "kind": "mcp", "transport": "stdio", "command": copy(&argv[0]),
        "args": arguments, "read_only": [copies.path()]});
    rest.call_tool("catalog_put", json!({"id": "command", "definition": command}))
        .await?;
    for id in ["program", "command"] {
        let script = json!({"turns": [[{"say": "ok"}]]});
        home.write_agent(id, json!({"tools": {"use": [id]}}), Some(script))?;
    }
    let project = rest.create_project("one", json!({})).await?;
    let mut samples = [(); 3].map(|()| TimingSamples::default());
    for round in 0..effort.scale(50) {
        let begun = clock::now();
        let mut bare = Command::new(&argv[0]);
        bare.args(&argv[1..]).arg("stdio");
        let client = rmcp_client(bare).await?;
        let took = clock::since(begun);
        client.cancel().await?;
        let program = context_build(&mut rest, &project, "program").await?;
        let command = context_build(&mut rest, &project, "command").await?;
        // The first round is warm-up: its caches are cold, and the program is hashed.
        if round > 0 {
            samples[0].push(took);
            samples[1].push(program);
            samples[2].push(command);
        }
    }
    let [bare, program, command] = &samples;
    let note = format!(
        "p50 {:.0} ms; bare on the host, with its first list of tools, {:.0} ms",
        program.p50(),
        bare.p50()
    );
    report.add_row(
        NAME,
        format!("context with `{TOOL_SERVER}` as a program, to the bare command"),
        program.p50() / bare.p50(),
        "×",
        BenchTarget::AtMost(1.25),
        note,
    );
    let note = format!(
        "difference of p50s, {} starts each; as a command in the same sandbox {:.0} ms",
        program.len(),
        command.p50()
    );
    report.add_row(
        NAME,
        "what an installed program adds to a start",
        program.p50() - command.p50(),
        "ms",
        BenchTarget::AtMost(5.0),
        note,
    );
    server.stop().await
}

/// Starts a session and returns how long its context took to build.
async fn context_build(rest: &mut RestClient, project: &str, agent: &str) -> Result<std::time::Duration> {
    let session = rest.start_session(project, agent, None).await?;
    let kinds = ["build_started", "build_finished", "tool_server_failed"];
    let recorded = rest
        .call_tool("debugger_events", json!({"session_id": session, "kinds": kinds}))
        .await?;
    let time = |kind: &str| -> Result<jiff::Timestamp> {
        let events = recorded["events"].as_array().into_iter().flatten();
        let event = events.into_iter().find(|event| event["kind"] == kind);
        let event = event.with_context(|| format!("no {kind} in {recorded}"))?;
        Ok(text_field(event, "ts")?.parse()?)
    };
    let took = time("build_finished")?.duration_since(time("build_started")?);
    ensure!(time("tool_server_failed").is_err(), "{recorded}");
    rest.call_tool("session_end", json!({ "session_id": session }))
        .await?;
    Ok(took.try_into()?)
}

/// Starts a real agent in sessions and bare on the host, each until its conversation is open.
async fn measure_agent(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    // Nothing listens there: only the start is measured.
    let home = BenchHome::new("[providers.openai]\nbase_url = \"http://127.0.0.1:9\"").await?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let presets = rest
        .call_tool("preset_list", json!({ "name": AGENT_PRESET }))
        .await?;
    let preset = &presets["presets"][0];
    let definition = &preset["definition"];
    let files = preset.get("files").cloned().unwrap_or(json!({}));
    let put = json!({"slug": "real", "definition": definition, "files": files});
    rest.call_tool("agent_put", put).await?;
    let runtime = &definition["runtime"];
    let package = text_field(&runtime["program"], "npm")?;
    rest.call_tool("program_install", json!({ "package": format!("npm:{package}") }))
        .await?;
    let name = package
        .rsplit_once('@')
        .map_or(package.as_str(), |(name, _)| name);
    let mut argv = installed_argv(&home, &mut rest, name, runtime["program"]["bin"].as_str()).await?;
    let arguments = runtime["args"].as_array().into_iter().flatten();
    argv.extend(arguments.filter_map(Value::as_str).map(str::to_owned));
    let project = rest.create_project("one", json!({})).await?;
    let (mut ours, mut bare) = (TimingSamples::default(), TimingSamples::default());
    for round in 0..effort.scale(30) {
        let begun = clock::now();
        open_bare_conversation(&argv, &runtime["env"]).await?;
        let took = clock::since(begun);
        let begun = clock::now();
        let message = json!({"project_id": project, "agent": "real", "message": "hi"});
        let session = text_field(&rest.call_tool("session_message", message).await?, "session_id")?;
        wait_until_running(&mut rest, &session).await?;
        let opened = clock::since(begun);
        rest.call_tool("session_end", json!({ "session_id": session }))
            .await?;
        // The first round is warm-up: its caches are cold.
        if round > 0 {
            bare.push(took);
            ours.push(opened);
        }
    }
    let note = format!(
        "difference of p50s, {} starts each of {package}: {:.0} ms in a session, {:.0} ms bare, until its conversation is open",
        ours.len(),
        ours.p50(),
        bare.p50()
    );
    report.add_row(
        NAME,
        "Oubliette's own part of a real agent's start",
        ours.p50() - bare.p50(),
        "ms",
        BenchTarget::AtMost(60.0),
        note,
    );
    server.stop().await
}

/// Waits until the session's agent has opened its conversation.
async fn wait_until_running(rest: &mut RestClient, session: &str) -> Result<()> {
    let mut since = -1;
    loop {
        let poll = json!({"session_id": session, "since_index": since, "wait_ms": 20_000});
        let page = rest.call_tool("session_events", poll).await?;
        for event in page["events"].as_array().into_iter().flatten() {
            since = event["index"].as_i64().unwrap_or(since);
            match event["status"].as_str() {
                Some("running") => return Ok(()),
                Some("failed") => bail!("{event}"),
                _ => {}
            }
        }
    }
}

/// The command of an installed program as it is run on the host.
async fn installed_argv(
    home: &BenchHome,
    rest: &mut RestClient,
    package: &str,
    bin: Option<&str>,
) -> Result<Vec<String>> {
    let listed = rest.call_tool("program_list", json!({})).await?;
    let programs = listed["programs"].as_array().context("no programs")?;
    let named = |program: &&Value| {
        let of = program["package"].as_str().unwrap_or_default();
        of.starts_with(&format!("npm:{package}@"))
    };
    let program = programs.iter().find(named).context("it is not installed")?;
    let tree = |id: &str| -> PathBuf { home.path().join("programs").join(id).join("tree") };
    let bins = &program["bins"];
    let chosen = bin.or(program["default_bin"].as_str()).context("which bin?")?;
    let file = tree(&text_field(program, "program_id")?).join(text_field(&bins[chosen], "file")?);
    let node = match program["node"].as_str() {
        None => "/usr/bin/node".into(),
        Some(id) => {
            let node = programs.iter().find(|other| other["program_id"] == id);
            let node = node.context("its Node.js is not installed")?;
            tree(id).join(text_field(&node["bins"]["node"], "file")?)
        }
    };
    let node = if Path::new(&node).exists() {
        node
    } else {
        "node".into()
    };
    let words = [node, file].map(|word| word.to_string_lossy().into_owned());
    match bins[chosen]["interpreter"].as_str() {
        Some("node") => Ok(words.to_vec()),
        _ => Ok(words[1..].to_vec()),
    }
}

/// Starts an agent on the host, has it open a conversation with one MCP server, and ends it.
async fn open_bare_conversation(argv: &[String], env: &Value) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut command = Command::new(&argv[0]);
    command
        .args(&argv[1..])
        .current_dir(dir.path())
        .env("HOME", dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    for (name, value) in env.as_object().into_iter().flatten() {
        let value = value.as_str().unwrap_or_default();
        command.env(name, value.replace("${model_url:openai}", "http://127.0.0.1:9"));
    }
    let mut child = command.spawn()?;
    let mut input = child.stdin.take().context("no stdin")?;
    let mut output = BufReader::new(child.stdout.take().context("no stdout")?).lines();
    let server = json!({"name": "echo", "command": own_program()?, "args": ["as-echo", "", "0"], "env": []});
    for (id, method, params) in [
        (
            1,
            "initialize",
            json!({"protocolVersion": 1, "clientCapabilities": {}}),
        ),
        (
            2,
            "session/new",
            json!({"cwd": dir.path(), "mcpServers": [server]}),
        ),
    ] {
        let request = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        input.write_all(format!("{request}\n").as_bytes()).await?;
        input.flush().await?;
        wait_for_answer(&mut output, id).await?;
    }
    child.kill().await?;
    Ok(())
}

async fn wait_for_answer(output: &mut Lines<BufReader<ChildStdout>>, id: u64) -> Result<()> {
    while let Some(line) = output.next_line().await? {
        let Ok(message) = serde_json::from_str::<Value>(&line) else {
            continue;
        };
        if message["id"] == id && message.get("method").is_none() {
            ensure!(message.get("error").is_none(), "{message}");
            return Ok(());
        }
    }
    bail!("the agent ended")
}
