//! `oubliette agent test`: one turn of an agent in a project of its own, with the time of each step, the tools the agent
//! sees, and the remedy for what fails.

use std::time::{Duration, Instant};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{client::ActionClient, output::field_text};

/// The prompt unless another is given.
pub(crate) const DEFAULT_PROMPT: &str = "Say hello in one short sentence.";
/// How long one turn may take: the first start may install a package.
const TURN_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// How long an agent of another's making may run in its turn without asking a model: without its settings it tries to
/// reach a service of its own, for many minutes.
const NO_MODEL_TIMEOUT: Duration = Duration::from_secs(3 * 60);
/// How long one request for events waits, in milliseconds.
const POLL_MS: u64 = 20_000;

/// Runs the test and returns its report: `ok`, `steps`, `tools`, `text`, `errors`, `remedies`.
pub(crate) async fn run(client: &ActionClient, slug: &str, prompt: &str) -> Result<Value> {
    let agent = client.call("agent_get", json!({ "slug": slug })).await?;
    let tested = TestedAgent {
        slug,
        is_acp: agent["definition"]["runtime"]["kind"] == "acp",
    };
    let project = client
        .call(
            "project_create",
            json!({ "name": format!("test of agent {slug}") }),
        )
        .await?;
    let project = field_text(&project, "project_id");
    let report = tokio::select! {
        report = run_turn(client, &project, tested, prompt) => report,
        _ = tokio::signal::ctrl_c() => Err(Error::unavailable("the test was interrupted")),
    };
    // Left behind if it cannot be deleted; the test's result matters more.
    let _ = end_sessions(client, &project).await;
    let _ = client
        .call("project_delete", json!({ "project_id": project }))
        .await;
    report
}

/// The agent that is tested.
#[derive(Clone, Copy)]
struct TestedAgent<'a> {
    slug: &'a str,
    /// Whether it is another program than the built-in agent.
    is_acp: bool,
}

/// Ends the sessions of a project, which cannot be deleted before.
async fn end_sessions(client: &ActionClient, project: &str) -> Result<()> {
    let list = client
        .call("session_list", json!({ "project_id": project }))
        .await?;
    for session in list["sessions"].as_array().into_iter().flatten() {
        let id = field_text(session, "session_id");
        client.call("session_end", json!({ "session_id": id })).await?;
    }
    Ok(())
}

async fn run_turn(
    client: &ActionClient,
    project: &str,
    agent: TestedAgent<'_>,
    prompt: &str,
) -> Result<Value> {
    let message = json!({ "message": prompt, "project_id": project, "agent": agent.slug });
    let started = client.call("session_message", message).await?;
    let session = field_text(&started, "session_id");
    let followed = follow(client, &session, agent).await;
    let seen = client.call("session_get", json!({ "session_id": session })).await;
    let recorded = client
        .call(
            "debugger_events",
            json!({ "session_id": session, "max_events": 1000 }),
        )
        .await;
    let (followed, recorded) = (followed?, recorded?);
    let events = &followed.events;
    let recorded = recorded["events"].as_array().cloned().unwrap_or_default();
    let of_type = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let mut errors: Vec<String> = of_type("error")
        .map(|event| field_text(event, "message"))
        .collect();
    errors.extend(followed.unfinished.clone());
    errors.extend(no_model_answered(&recorded));
    let completed = of_type("turn_completed").next();
    let started = of_type("status").any(|event| event["status"] == "running");
    let remedies: Vec<String> = match errors.is_empty() {
        true => Vec::new(),
        false => remedies(agent, started, &recorded),
    };
    let text = completed.map_or_else(
        || of_type("delta").map(|event| field_text(event, "text")).collect(),
        |event| field_text(event, "text"),
    );
    Ok(json!({
        "slug": agent.slug,
        "ok": completed.is_some() && errors.is_empty(),
        "steps": steps(events, &recorded),
        "tools": seen.ok().map(|seen| seen["tools_listed"].clone()),
        "text": text,
        "errors": errors,
        "remedies": remedies,
    }))
}

/// The error of a turn in which the model's provider answered no request. Some agents report it as their own words and end
/// the turn as if all were well.
fn no_model_answered(recorded: &[Value]) -> Option<String> {
    let statuses: Vec<u64> = recorded
        .iter()
        .filter(|event| event["kind"] == "model_request")
        .filter_map(|event| event["status"].as_u64())
        .collect();
    match statuses.is_empty() || statuses.iter().any(|status| *status < 400) {
        true => None,
        false => Some(format!(
            "none of its {} model requests was answered",
            statuses.len()
        )),
    }
}

/// What to do about a failed test, where the errors do not say it: agents seldom show more than a few words of what a
/// model provider answered, and none knows where its key is written.
fn remedies(agent: TestedAgent<'_>, started: bool, recorded: &[Value]) -> Vec<String> {
    let slug = agent.slug;
    // The first since the last that was answered: the forwarder answers an agent that asks again with another status.
    let requests = recorded
        .iter()
        .rev()
        .filter(|event| event["kind"] == "model_request");
    let failed = |event: &&Value| event["status"].as_u64().is_some_and(|status| status >= 400);
    if let Some(request) = requests.take_while(failed).last() {
        let provider = field_text(request, "provider");
        let what = match request["status"].as_u64() {
            Some(401 | 403) => "its key is wrong, or may not use this model: correct the variable that `api_key_env` names, \
                in the environment of the server, and restart the server"
                .to_owned(),
            Some(404) => format!(
                "it has nothing at {}: check `base_url`, and that the provider has the agent's model",
                field_text(request, "path")
            ),
            Some(429) => "its rate or its budget is used up: wait, or raise it there".to_owned(),
            Some(502..=504) => "it cannot be reached or does not answer: check `base_url`".to_owned(),
            Some(500..) => "it failed itself: try again, and look at its log or its status page".to_owned(),
            _ => "it does not accept what this agent asks: check that the provider speaks the API that `oubliette agent \
                presets` names for it, and has the agent's model"
                .to_owned(),
        };
        let status = &request["status"];
        return vec![format!(
            "the model provider [providers.{provider}] of oubliette.toml answered {status}; {what}"
        )];
    }
    let asked = recorded.iter().any(|event| event["kind"] == "model_request");
    if agent.is_acp && started && !asked {
        return vec![format!(
            "it asked no model of oubliette.toml: `env` or `args` of `runtime` in agents/{slug}/agent.json have to give it the \
             address ${{model_url:PROVIDER}}, in the way this agent takes one (`oubliette agent presets` has some that work)"
        )];
    }
    // Its tools were ready, so it was the agent that failed.
    let tools_ready = recorded.iter().any(|event| event["kind"] == "build_finished");
    match !started && tools_ready {
        true => vec![format!(
            "its command did not become an agent: compare `runtime` in agents/{slug}/agent.json with what it said above; \
             another version of a package may want other arguments (`oubliette agent presets` has some that work)"
        )],
        false => Vec::new(),
    }
}

/// The events of a test's session.
struct FollowedTurn {
    events: Vec<Value>,
    /// Why the turn was given up, if it was.
    unfinished: Option<String>,
}

/// The session's events until its turn is over, or is given up.
async fn follow(client: &ActionClient, session: &str, agent: TestedAgent<'_>) -> Result<FollowedTurn> {
    let deadline = Instant::now() + TURN_TIMEOUT;
    let mut running_since: Option<Instant> = None;
    let mut events: Vec<Value> = Vec::new();
    let mut since = -1;
    let has_status = |events: &[Value], wanted: &[&str]| {
        events.iter().any(|event| {
            event["type"] == "status" && event["status"].as_str().is_some_and(|s| wanted.contains(&s))
        })
    };
    while Instant::now() < deadline {
        let poll =
            json!({ "session_id": session, "since_index": since, "max_events": 1000, "wait_ms": POLL_MS });
        let page = client.call("session_events", poll).await?;
        since = page["last_index"].as_i64().unwrap_or(since);
        events.extend(page["events"].as_array().cloned().unwrap_or_default());
        if has_status(&events, &["idle", "failed", "ended"]) {
            return Ok(FollowedTurn {
                events,
                unfinished: None,
            });
        }
        if running_since.is_none() && has_status(&events, &["running"]) {
            running_since = Some(Instant::now());
        }
        let waited = running_since.is_some_and(|since| since.elapsed() >= NO_MODEL_TIMEOUT);
        if agent.is_acp && waited && !has_asked_model(client, session).await? {
            let minutes = NO_MODEL_TIMEOUT.as_secs() / 60;
            return Ok(FollowedTurn {
                events,
                unfinished: Some(format!(
                    "after {minutes} minutes of its turn it has asked no model"
                )),
            });
        }
    }
    Ok(FollowedTurn {
        events,
        unfinished: Some(format!(
            "its turn is not over after {} minutes",
            TURN_TIMEOUT.as_secs() / 60
        )),
    })
}

/// Whether the session's agent has asked a model.
async fn has_asked_model(client: &ActionClient, session: &str) -> Result<bool> {
    let asked = json!({ "session_id": session, "kinds": ["model_request"], "max_events": 1 });
    let found = client.call("debugger_events", asked).await?;
    Ok(found["events"]
        .as_array()
        .is_some_and(|events| !events.is_empty()))
}

/// How long each step took, in milliseconds, from the times of the events.
fn steps(events: &[Value], recorded: &[Value]) -> Vec<Value> {
    let time = |event: &Value| {
        event["ts"]
            .as_str()
            .and_then(|ts| ts.parse::<jiff::Timestamp>().ok())
    };
    let event = |matches: &dyn Fn(&Value) -> bool| events.iter().find(|event| matches(event)).and_then(time);
    let debug = |kind: &str| recorded.iter().find(|event| event["kind"] == kind).and_then(time);
    let status = |status: &str| event(&|event| event["type"] == "status" && event["status"] == status);
    // A program that is not installed yet is, between a `starting` with a reason and one without.
    let starting: Vec<&Value> = events
        .iter()
        .take_while(|event| event["status"] != "running")
        .filter(|event| event["status"] == "starting")
        .collect();
    let installing = starting.iter().position(|event| event["reason"].is_string());
    let starting_at = |index: usize| starting.get(index).and_then(|event| time(event));
    let began = starting.last().and_then(|event| time(event));
    let began = began.or_else(|| events.first().and_then(time));
    let running = status("running");
    let spans = [
        (
            "installation of its package",
            installing.and_then(starting_at),
            installing.and_then(|index| starting_at(index + 1)),
        ),
        ("tool servers", debug("build_started"), debug("build_finished")),
        (
            "start until the agent has opened its conversation",
            began,
            running,
        ),
        ("first model request answered", running, debug("model_request")),
        ("first text", running, event(&|event| event["type"] == "delta")),
        (
            "whole turn",
            running,
            event(&|event| event["type"] == "turn_completed"),
        ),
    ];
    let took = |(step, from, to): (&str, Option<jiff::Timestamp>, Option<jiff::Timestamp>)| {
        let ms = to?.duration_since(from?).as_secs_f64() * 1e3;
        Some(json!({ "step": step, "ms": ms.max(0.0).round() }))
    };
    spans.into_iter().filter_map(took).collect()
}

/// The report for people.
pub(crate) fn format_report(report: &Value) -> String {
    let mut lines = Vec::new();
    for step in report["steps"].as_array().into_iter().flatten() {
        let ms = step["ms"].as_f64().unwrap_or_default();
        lines.push(format!("{:>8.0} ms  {}", ms, field_text(step, "step")));
    }
    match report["tools"].as_array() {
        Some(tools) => {
            let names: Vec<&str> = tools.iter().filter_map(Value::as_str).collect();
            lines.push(format!("it sees {} tools: {}", names.len(), names.join(", ")));
        }
        // Of an agent that has not started, the errors below say more.
        None if lines.is_empty() => {}
        None => lines.push("it has not listed its tools".to_owned()),
    }
    if let Some(text) = report["text"].as_str().filter(|text| !text.is_empty()) {
        lines.push(format!("it said: {text}"));
    }
    for error in report["errors"].as_array().into_iter().flatten() {
        lines.push(format!("failed: {}", error.as_str().unwrap_or_default()));
    }
    for remedy in report["remedies"].as_array().into_iter().flatten() {
        lines.push(format!("what to do: {}", remedy.as_str().unwrap_or_default()));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITER: TestedAgent<'static> = TestedAgent {
        slug: "writer",
        is_acp: true,
    };

    #[test]
    fn a_turn_whose_model_requests_all_failed_is_not_a_success() {
        let asked = |statuses: &[u64]| {
            let event = |status: &u64| json!({"kind": "model_request", "status": status});
            no_model_answered(&statuses.iter().map(event).collect::<Vec<_>>())
        };
        assert_eq!(asked(&[]), None, "a script asks none");
        assert_eq!(asked(&[502, 200]), None);
        assert!(asked(&[502, 502]).is_some_and(|said| said.contains("none of its 2")));
    }

    #[test]
    fn the_installation_of_a_package_is_a_step_of_its_own() {
        let event = |second: u32, status: &str, reason: Option<&str>| {
            let ts = format!("2026-01-01T00:00:{second:02}Z");
            json!({"type": "status", "status": status, "reason": reason, "ts": ts})
        };
        let ready = [event(0, "starting", None), event(2, "running", None)];
        let started =
            |ms: f64| json!({"step": "start until the agent has opened its conversation", "ms": ms});
        assert_eq!(steps(&ready, &[]), [started(2000.0)]);
        let first = [
            event(0, "starting", None),
            event(1, "starting", Some("npm:a@1.0.0 is being installed")),
            event(41, "starting", None),
            event(44, "running", None),
        ];
        let installed = json!({"step": "installation of its package", "ms": 40_000.0});
        assert_eq!(steps(&first, &[]), [installed, started(3000.0)]);
    }

    #[test]
    fn a_failed_test_says_what_to_do() {
        let asked = |status: u64| {
            let event =
                json!({"kind": "model_request", "provider": "mine", "path": "/v1/x", "status": status});
            remedies(
                WRITER,
                true,
                &[json!({"kind": "model_request", "status": 200}), event],
            )
            .join("")
        };
        assert!(asked(401).contains("[providers.mine]") && asked(401).contains("api_key_env"));
        assert!(asked(404).contains("/v1/x") && asked(404).contains("base_url"));
        assert!(asked(502).contains("base_url") && asked(500).contains("failed itself"));
        assert!(asked(200).is_empty());
        let repeated = [502, 400, 400].map(|status| json!({"kind": "model_request", "status": status}));
        assert!(
            remedies(WRITER, true, &repeated)
                .join("")
                .contains("answered 502")
        );
        let ready = [json!({"kind": "build_finished"})];
        assert!(
            remedies(WRITER, false, &ready)
                .join("")
                .contains("agents/writer/agent.json")
        );
        assert!(
            remedies(WRITER, true, &ready)
                .join("")
                .contains("${model_url:PROVIDER}"),
            "it started and asked no model"
        );
        let built_in = TestedAgent {
            is_acp: false,
            ..WRITER
        };
        assert!(remedies(built_in, true, &ready).is_empty());
        assert!(
            remedies(WRITER, false, &[]).is_empty(),
            "a provider without a key is said by the error"
        );
    }
}
