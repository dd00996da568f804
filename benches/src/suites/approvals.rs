//! What rules with arguments, waiting approvals and the reading of usage cost.

use std::{hint::black_box, path::Path, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use oubliette_protocol::{agent::AgentToolSettings, argument_schema::CheckEffort, tool::ToolRule};
use oubliette_tools::{CallJudgement, allow::ToolRules};
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

use super::BenchEffort;
use crate::{
    actors::model::UNREAD_PATH,
    baseline, clock,
    home::{BenchHome, client_command},
    http::ANSWER_TIMEOUT,
    lines::JsonRpcLines,
    procs,
    report::{BenchReport, BenchTarget},
    stats::{TimingSamples, time_each, time_interleaved},
};

const NAME: &str = "approvals and usage";

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    measure_judgement(report, effort)?;
    Box::pin(measure_ruled_calls(report, effort)).await?;
    Box::pin(measure_pending(report, effort)).await?;
    Box::pin(measure_first_byte(report, effort)).await
}

/// Arguments with ten properties, and a schema that has something to say about each of them.
fn ten_properties() -> (Value, Value) {
    let (mut arguments, mut properties) = (Map::new(), Map::new());
    arguments.insert("text".into(), json!("hello"));
    properties.insert("text".into(), json!({"type": "string", "maxLength": 1000}));
    for n in 0..3 {
        arguments.insert(format!("path{n}"), json!(format!("src/part/file{n}.rs")));
        properties.insert(format!("path{n}"), json!({"type": "string", "pattern": "^src/"}));
        arguments.insert(format!("count{n}"), json!(n));
        properties.insert(
            format!("count{n}"),
            json!({"type": "integer", "minimum": 0, "maximum": 1000}),
        );
        arguments.insert(format!("mode{n}"), json!("append"));
        properties.insert(
            format!("mode{n}"),
            json!({"enum": ["replace", "append", "create"]}),
        );
    }
    let required: Vec<&String> = properties.keys().collect();
    let schema = json!({"type": "object", "properties": properties, "required": required});
    (Value::Object(arguments), schema)
}

/// Rules under which a call with [`ten_properties`] is checked against the whole schema and then made.
fn ruled_settings(schema: &Value) -> Value {
    // The last property does not fit, so nothing before it ends the check early.
    let mut schema = schema.clone();
    schema["properties"]["text"] = json!({"const": "something else"});
    json!({"use": ["echo"], "denied": [{"tool": "*echo*", "when": schema}]})
}

/// The time to judge one call, in this process.
fn measure_judgement(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let (arguments, schema) = ten_properties();
    let settings: AgentToolSettings = serde_json::from_value(ruled_settings(&schema))?;
    let rules = ToolRules::new(&settings).of_other_tool("myapp_echo", ToolRule::BaseTool);
    let by_arguments = rules.by_arguments().context("no rule looks at the arguments")?;
    let rounds = effort.scale(200_000);
    let begun = Instant::now();
    for _ in 0..rounds {
        let judged = by_arguments.judge(black_box(&arguments), CheckEffort::Small);
        ensure!(
            matches!(judged, Some(CallJudgement::Allowed)),
            "the call was not allowed"
        );
    }
    report.add_row(
        NAME,
        "judging a call by a schema of ten properties",
        begun.elapsed().as_secs_f64() * 1e6 / rounds as f64,
        "µs",
        BenchTarget::AtMost(5.0),
        "one entry of `denied` with `when`, which does not hold",
    );
    Ok(())
}

/// The same call of the same tool, by an agent without rules and by one with a rule that looks at the arguments.
async fn measure_ruled_calls(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let (arguments, schema) = ten_properties();
    let home = BenchHome::new("").await?;
    home.write_sandboxed_echo("echo", "rules", 0)?;
    let script = || Some(json!({"turns": [[{"say": "ok"}]]}));
    home.write_agent("plain", json!({"tools": {"use": ["echo"]}}), script())?;
    home.write_agent("ruled", json!({ "tools": ruled_settings(&schema) }), script())?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let mut agents = Vec::new();
    for agent in ["ruled", "plain"] {
        let session = rest.start_session(&project, agent, None).await?;
        let socket = rest.relay_socket(&session).await?;
        agents.push(JsonRpcLines::spawn_mcp(&mut client_command(&socket, None)?).await?);
    }
    let [ruled, plain] = agents.as_mut_slice() else {
        bail!("two agents were started");
    };
    let call = json!({"name": "echo_echo", "arguments": arguments});
    let (with_rule, without) = time_interleaved(
        effort.scale(80),
        100,
        async || ruled.call("tools/call", &call).await,
        async || plain.call("tools/call", &call).await,
    )
    .await?;
    report.add_row(
        NAME,
        "added to a call of a stdio tool by that rule, p50",
        (with_rule.p50() - without.p50()) * 1e3,
        "µs",
        BenchTarget::None,
        format!("p50 {:.3} ms against {:.3} ms", with_rule.p50(), without.p50()),
    );
    drop((agents, rest));
    server.stop().await
}

/// Calls that wait for a person: what each costs, and how long their list takes.
async fn measure_pending(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let waiting = effort.scale(10_000);
    let home = BenchHome::new("[approval]\ntimeout = \"1h\"").await?;
    let tools = json!({"ask": ["project_list"]});
    home.write_agent(
        "asks",
        json!({ "tools": tools }),
        Some(json!({"turns": [[{"say": "ok"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "asks", None).await?;
    let socket = rest.relay_socket(&session).await?;
    let before = procs::memory_once_stable(server.pid).await?;
    let mut agent = JsonRpcLines::connect(&socket).await?;
    let begun = clock::now();
    for _ in 0..waiting {
        agent.send("project_list", &json!({})).await?;
    }
    // Read to the end of its log: the last request is there.
    let (mut requested, mut since) = (0, -1);
    while requested < waiting {
        ensure!(
            clock::since(begun) < ANSWER_TIMEOUT,
            "only {requested} of {waiting} calls wait"
        );
        let query = json!({"session_id": session, "since_index": since, "max_events": 1000, "wait_ms": 1000});
        let page = rest.call_tool("session_events", query).await?;
        since = page["last_index"].as_i64().context("no last_index")?;
        let events = page["events"].as_array().into_iter().flatten();
        requested += events
            .filter(|event| event["type"] == "approval_requested")
            .count();
    }
    let took = clock::since(begun);
    let after = procs::memory_once_stable(server.pid).await?;
    report.add_row(
        NAME,
        format!("memory of each of {waiting} waiting calls"),
        (after.rss - before.rss) / waiting as f64,
        "KiB",
        BenchTarget::AtMost(20.0),
        format!(
            "server {:.0} MiB, {:.0} MiB before; requested at {:.0}/s",
            after.rss / 1024.0,
            before.rss / 1024.0,
            waiting as f64 / took.as_secs_f64()
        ),
    );

    for (what, filter) in [
        ("all that wait", json!({"status": "pending"})),
        (
            "those of one session",
            json!({"status": "pending", "session_id": session}),
        ),
    ] {
        let mut pages = TimingSamples::default();
        let (mut listed, mut cursor) = (0, None);
        loop {
            let mut arguments = filter.clone();
            if let Some(cursor) = &cursor {
                arguments["cursor"] = json!(cursor);
            }
            let mut page = Value::Null;
            let time = time_each(1, async || {
                page = rest.call_tool("approval_list", arguments.clone()).await?;
                Ok(())
            });
            pages.extend(time.await?);
            listed += page["approvals"].as_array().map_or(0, Vec::len);
            cursor = page["next_cursor"].as_str().map(str::to_owned);
            if cursor.is_none() {
                break;
            }
        }
        ensure!(listed == waiting, "{listed} of {waiting} approvals are listed");
        report.add_row(
            NAME,
            format!("a page of {waiting} pending approvals ({what})"),
            pages.percentile(100.0),
            "ms",
            BenchTarget::AtMost(20.0),
            format!("the slowest of {} pages; p50 {:.2} ms", pages.len(), pages.p50()),
        );
    }
    drop((agent, rest));
    server.stop().await
}

/// The first byte of a streamed answer whose usage is read, against one that is only forwarded.
async fn measure_first_byte(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let model = baseline::start_http_server("as-model").await?;
    let providers = format!(
        "[providers.bench]\nbase_url = \"http://{0}\"\n[providers.unread]\nbase_url = \"http://{0}/{UNREAD_PATH}\"",
        model.address
    );
    let home = BenchHome::new(&providers).await?;
    home.write_talker_agent("talker")?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "talker", None).await?;
    let socket = rest.relay_socket(&session).await?.with_file_name("model.sock");
    let mut connection = ModelConnection::open(&socket).await?;
    let (mut read, mut forwarded) = (TimingSamples::default(), TimingSamples::default());
    // Few: a session may make 600 requests a minute.
    for round in 0..effort.scale(250) {
        let counted = connection.first_byte("/bench/v1/messages", " 200").await?;
        // The same way and the same bytes, but for the status: its usage is not read.
        let bare = connection.first_byte("/unread/v1/messages", " 400").await?;
        if round > 0 {
            read.push(counted);
            forwarded.push(bare);
        }
    }
    let note = format!("p50 {:.3} ms against {:.3} ms", read.p50(), forwarded.p50());
    report.add_row(
        NAME,
        "first byte of a streamed answer whose usage is read, to one that is only forwarded",
        read.p50() / forwarded.p50(),
        "×",
        BenchTarget::AtMost(1.1),
        note,
    );
    drop((connection, rest));
    server.stop().await
}

/// A connection to a session's model socket, as a process in its sandbox has one.
struct ModelConnection(BufReader<UnixStream>);

impl ModelConnection {
    async fn open(socket: &Path) -> Result<Self> {
        Ok(Self(BufReader::new(UnixStream::connect(socket).await?)))
    }

    /// Asks for an answer and reads it whole; returns the time to the first byte of its body.
    async fn first_byte(&mut self, path: &str, expected: &str) -> Result<std::time::Duration> {
        let body = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]})
            .to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: model\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let begun = clock::now();
        self.0.get_mut().write_all(request.as_bytes()).await?;
        let status = self.read_line().await?;
        ensure!(status.contains(expected), "{path}: {status}");
        while !self.read_line().await?.is_empty() {}
        let mut first = None;
        loop {
            let line = self.read_line().await?;
            let size = usize::from_str_radix(&line, 16).with_context(|| format!("no chunk: {line:?}"))?;
            let mut chunk = vec![0; size + 2];
            if size > 0 {
                let (head, rest) = chunk.split_at_mut(1);
                self.0.read_exact(head).await?;
                first.get_or_insert_with(|| clock::since(begun));
                self.0.read_exact(rest).await?;
            } else {
                self.0.read_exact(&mut chunk).await?;
                return first.context("an answer without a body");
            }
        }
    }

    async fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(
            self.0.read_line(&mut line).await? > 0,
            "the gateway closed the connection"
        );
        Ok(line.trim_end().to_owned())
    }
}
