//! The pages of what goes over the wire: tools, events, error codes, HTTP routes and metrics.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use oubliette_protocol::{
    ErrorCode,
    debug::DebugEvent,
    event::SessionEvent,
    usage::{UsageTotals, UsdNanos},
};
use oubliette_session::ProviderUsage;
use serde_json::Value;

use super::{
    fields::{cell, description, field_table, field_table_without, tag, variants},
    written_schema,
};
use crate::{
    actions::{self, Effect},
    doors::openapi,
    metrics::{MetricGauges, Metrics},
};

/// The page of Oubliette's own tools.
pub(super) fn tools_page() -> String {
    let mut out = "# Oubliette's own tools\n\nThe tools of the MCP endpoint `/mcp`. Each is also `POST /api/tools/NAME` with its \
        arguments as a JSON object, a command of `oubliette`, and, for an agent with a key, `oubliette_NAME`. A client is shown \
        those that its token may call. An unknown argument is refused.\n\n| tool | scope | does |\n|---|---|---|\n"
        .to_owned();
    for action in actions::all() {
        let first = action
            .description
            .split_inclusive(". ")
            .next()
            .unwrap_or_default();
        let _ = writeln!(
            out,
            "| [`{}`](#{}) | {} | {} |",
            action.name,
            action.name,
            action.scope,
            cell(first)
        );
    }
    for action in actions::all() {
        let audited = match action.effect {
            Effect::Read => "changes nothing",
            Effect::Write | Effect::Set | Effect::Delete | Effect::Stream => "is in the audit log",
        };
        let _ = write!(
            out,
            "\n## `{}`\n\n{}\n\nScope `{}`; {audited}.\n\n{}",
            action.name,
            cell(action.description),
            action.scope,
            field_table(&Value::Object((action.schema)().clone())).replace("No fields.", "No arguments."),
        );
    }
    out
}

/// The page of session events.
pub(super) fn events_page() -> String {
    let intro = "# Session events\n\nA session's log, which `session_events`, `GET /api/sessions/{id}/events`, MCP notifications and \
        webhooks show. `index` has no holes, and an event is durable before anybody is shown it. Every event has:";
    event_page(intro, &written_schema::<SessionEvent>(), "type")
}

/// The page of debugger events.
pub(super) fn debugger_page() -> String {
    let intro = "# Debugger events\n\nThe debugger's log, which `debugger_events`, `GET /api/debugger` and the console show. `index` is one \
        for the whole server. Secrets are masked, and arguments and results of more than 64 KiB are cut. Every event has:";
    event_page(intro, &written_schema::<DebugEvent>(), "kind")
}

fn event_page(intro: &str, event: &Value, tag_field: &str) -> String {
    let mut common = event.clone();
    if let Some(object) = common.as_object_mut() {
        object.remove("oneOf");
        object.remove("anyOf");
    }
    let mut out = format!(
        "{intro}\n\n{}| `{tag_field}` | string, required | One of those below. |\n",
        field_table(&common)
    );
    for variant in variants(event) {
        let name = tag(variant).map_or("?", |(_, name)| name);
        let _ = write!(out, "\n## `{name}`\n\n{}\n\n", cell(description(variant)));
        out.push_str(&field_table_without(variant, &[tag_field]));
    }
    out
}

/// The page of error codes.
pub(super) fn errors_page() -> String {
    let codes = written_schema::<ErrorCode>();
    let meanings: BTreeMap<&str, &str> = variants(&codes)
        .into_iter()
        .filter_map(|variant| Some((variant["const"].as_str()?, description(variant))))
        .collect();
    let mut out = "# Error codes\n\nAn error is `{\"error\": {\"code\", \"message\"}}`: the body over HTTP, `structuredContent` of an MCP result \
        with `isError`, what `--json` prints. On the relay socket it is a JSON-RPC error, with the code as `data.code`. `message` \
        says what is wrong and what to do next.\n\n| code | HTTP | JSON-RPC | means |\n|---|---|---|---|\n"
        .to_owned();
    for code in ErrorCode::ALL {
        let meaning = meanings.get(code.as_str()).copied().unwrap_or_default();
        let _ = writeln!(
            out,
            "| `{code}` | {} | {} | {} |",
            code.http_status(),
            code.rpc_code(),
            cell(meaning)
        );
    }
    out.push_str(
        "\nAn unknown tool name is JSON-RPC error -32602 over MCP and `not_found` over HTTP. Requests that never reach a tool: a wrong \
         `Host` or `Origin` is 403, a body over 4 MiB (of `library_push` 32 MiB) 413, a JSON-RPC batch 400.\n",
    );
    out
}

/// The page of HTTP routes.
pub(super) fn http_page() -> String {
    let document = openapi::document();
    let mut out = "# HTTP\n\n`GET /api/openapi.json` is this page for programs. A token is sent as `Authorization: Bearer TOKEN`; the \
        console's cookie works under `/api` only, and changes by it need the header `X-Oubliette: 1`.\n\n\
        | route | auth | is |\n|---|---|---|\n\
        | `/mcp` | bearer | MCP, streamable HTTP: revisions 2025-03-26 to 2026-07-28 |\n\
        | `POST /api/tools/{name}` | bearer or cookie | one of [Oubliette's own tools](reference-tools.md) |\n\
        | `GET /api/openapi.json` | none | the OpenAPI document, with the type of every result |\n\
        | `GET /api/schemas/{agent,tool,config}.json` | none | the JSON Schemas of agent.json, tool.json and oubliette.toml |\n\
        | `POST /api/login` | a token in the body, `{\"token\"}` | sets the console's cookie |\n\
        | `POST /api/logout` | cookie | removes it |\n\
        | `GET /health` | none | the server runs |\n\
        | `GET /ready` | none | it can take work: 503 while the database or the sandbox is not usable |\n\
        | `GET /metrics` | bearer, scope `read` | [Prometheus text](reference-metrics.md) |\n\
        | `GET /docs/` | none | this book |\n\
        | `GET /` | none | the console |\n"
        .to_owned();
    for (path, operations) in document["paths"].as_object().into_iter().flatten() {
        if path.starts_with("/api/tools/") || path.starts_with("/api/schemas/") {
            continue;
        }
        for (method, operation) in operations.as_object().into_iter().flatten() {
            let query = operation["parameters"].as_array().into_iter().flatten();
            let query = query.filter(|parameter| parameter["in"] == "query");
            let query: Vec<_> = query.filter_map(|parameter| parameter["name"].as_str()).collect();
            let query = match query.is_empty() {
                true => String::new(),
                false => format!("?{}=", query.join("=&")),
            };
            let summary = operation["summary"].as_str().unwrap_or_default();
            let _ = writeln!(
                out,
                "| `{} {path}{query}` | bearer or cookie | {} |",
                method.to_uppercase(),
                cell(summary)
            );
        }
    }
    out.push_str(
        "\nNo token, or a bad one: 401 with `WWW-Authenticate: Bearer`. A `Host` or `Origin` that `[server] allowed_hosts` does not list: \
         403. Past the rate of a token: 429 with `Retry-After`. Unknown paths: 404.\n",
    );
    out
}

/// The page of metrics.
pub(super) fn metrics_page() -> String {
    let metrics = Metrics::default();
    // So that every family has a row that shows its labels.
    metrics.count_request("mcp", 200);
    metrics.count_action("project_list", None, Duration::ZERO);
    metrics.calls.count_one_each();
    let text = metrics.to_prometheus_text(&MetricGauges {
        disk: Some((0, 0)),
        providers: vec![ProviderUsage {
            provider: "example".to_owned(),
            totals: UsageTotals {
                cost_usd: Some(UsdNanos::default()),
                ..UsageTotals::default()
            },
        }],
        ..MetricGauges::default()
    });
    let mut out = "# Metrics\n\n`GET /metrics`, with a token of scope `read`, in the text format of Prometheus. Counters count from the \
        start of the process. Of a server of a [cluster](guide-servers.md) every sample has the label \
        `server_address` too: its `[cluster] advertise`.\n\n| metric | type | labels | is |\n|---|---|---|---|\n"
        .to_owned();
    let mut help: BTreeMap<&str, &str> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, meaning)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            help.insert(name, meaning);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let meaning = help.get(name).copied().unwrap_or_default();
            let _ = writeln!(
                out,
                "| `{name}` | {kind} | {} | {} |",
                labels_of(&text, name),
                cell(meaning)
            );
        }
    }
    out
}

/// The names of the labels of a metric, as a sample has them, without the bound of a histogram's bucket.
fn labels_of(text: &str, name: &str) -> String {
    let sample = text.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        let rest = rest.strip_prefix("_bucket").unwrap_or(rest);
        rest.strip_prefix('{')?.split_once('}').map(|(labels, _)| labels)
    });
    let labels = sample
        .unwrap_or_default()
        .split(',')
        .filter_map(|label| label.split_once('='))
        .filter(|(label, _)| *label != "le");
    let labels: Vec<_> = labels.map(|(label, _)| format!("`{label}`")).collect();
    labels.join(", ")
}
