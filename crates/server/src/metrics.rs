//! Counters and gauges of `/metrics`, in Prometheus text format.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use oubliette_protocol::ErrorCode;
use parking_lot::Mutex;

use crate::{
    call_times::CallTimes,
    histogram::{DurationHistogram, escape_label},
};

/// Counters of requests and actions since the start.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    actions: Mutex<BTreeMap<(&'static str, &'static str), ActionTotals>>,
    action_times: DurationHistogram<2>,
    commit_times: DurationHistogram<0>,
    /// Durations of calls and model requests.
    pub(crate) calls: CallTimes,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Mutex::default(),
            actions: Mutex::default(),
            action_times: DurationHistogram::new(
                "oubliette_action_duration_seconds",
                "Duration of actions, by action and outcome.",
                ["action", "outcome"],
            ),
            commit_times: DurationHistogram::new(
                "oubliette_commit_duration_seconds",
                "How long audited actions waited for their commit to the database.",
                [],
            ),
            calls: CallTimes::default(),
        }
    }
}

/// How often an action ended with one outcome, and the time that took in total.
#[derive(Debug, Default, Clone, Copy)]
struct ActionTotals {
    count: u64,
    seconds: f64,
}

/// Values measured when `/metrics` is read.
#[derive(Debug, Default)]
pub(crate) struct MetricGauges {
    /// Sessions in memory.
    pub sessions: u64,
    /// Open stateful MCP sessions.
    pub mcp_sessions: u64,
    /// Open GET streams of MCP sessions.
    pub streams: u64,
    /// Callers' open streams, polls and waits, and the calls that wait for callers.
    pub callers: oubliette_session::CallerLoad,
    /// Live tokio tasks.
    pub tasks: u64,
    /// What was used of each model provider since the start.
    pub providers: Vec<oubliette_session::ProviderUsage>,
    /// Seconds since the start.
    pub uptime: f64,
    /// Size of the database, in bytes.
    pub database_bytes: u64,
    /// Size of the home's file system, and what is free of it, in bytes.
    pub disk: Option<(u64, u64)>,
    /// How many servers share the database; 1 without `[cluster]`, 0 if it cannot be read.
    pub servers: u64,
    /// Where the other servers of a cluster reach this one: then it is a label of everything.
    pub server_address: Option<String>,
}

impl Metrics {
    /// Counts an answered request.
    pub(crate) fn count_request(&self, door: &'static str, status: u16) {
        *self.requests.lock().entry((door, status)).or_default() += 1;
    }

    /// Counts an action that was performed or refused, and how long it took.
    pub(crate) fn count_action(&self, name: &'static str, error: Option<ErrorCode>, took: Duration) {
        let outcome = error.map_or("ok", ErrorCode::as_str);
        self.action_times.observe([name, outcome], took.as_secs_f64());
        let mut actions = self.actions.lock();
        let timed = actions.entry((name, outcome)).or_default();
        timed.count += 1;
        timed.seconds += took.as_secs_f64();
    }

    /// Counts a commit that somebody waited for.
    pub(crate) fn count_commit(&self, took: Duration) {
        self.commit_times.observe([], took.as_secs_f64());
    }

    /// All counters, gauges and histograms in Prometheus text format.
    pub(crate) fn to_prometheus_text(&self, gauges: &MetricGauges) -> String {
        let mut out = String::with_capacity(4096);
        let mut family = |name: &str, kind: &str, help: &str, rows: Vec<(String, f64)>| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in rows {
                let _ = writeln!(out, "{name}{labels} {value}");
            }
        };
        let requests = self.requests.lock().clone();
        let rows = requests
            .iter()
            .map(|((door, status), n)| (format!("{{door=\"{door}\",status=\"{status}\"}}"), *n as f64));
        family(
            "oubliette_http_requests_total",
            "counter",
            "HTTP requests answered.",
            rows.collect(),
        );
        let actions = self.actions.lock().clone();
        let label = |(name, outcome): &(&str, &str)| format!("{{action=\"{name}\",outcome=\"{outcome}\"}}");
        let rows = actions.iter().map(|(k, t)| (label(k), t.count as f64));
        family(
            "oubliette_actions_total",
            "counter",
            "Actions performed.",
            rows.collect(),
        );
        let rows = actions.iter().map(|(k, t)| (label(k), t.seconds));
        family(
            "oubliette_action_seconds_total",
            "counter",
            "Time spent in actions.",
            rows.collect(),
        );
        let one = |value: f64| vec![(String::new(), value)];
        family(
            "oubliette_sessions_live",
            "gauge",
            "Sessions in memory.",
            one(gauges.sessions as f64),
        );
        family(
            "oubliette_servers",
            "gauge",
            "Servers that share the database, this one included; 0 while it cannot be read.",
            one(gauges.servers as f64),
        );
        family(
            "oubliette_mcp_sessions",
            "gauge",
            "Open MCP sessions.",
            one(gauges.mcp_sessions as f64),
        );
        family(
            "oubliette_streams",
            "gauge",
            "Open event streams.",
            one(gauges.streams as f64),
        );
        let held = gauges.callers;
        let kinds = [
            ("stream", held.streams),
            ("poll", held.polls),
            ("wait", held.waits),
        ];
        let rows = kinds.map(|(kind, n)| (format!("{{kind=\"{kind}\"}}"), n as f64));
        family(
            "oubliette_caller_calls_open",
            "gauge",
            "Calls that wait for a caller.",
            one(held.calls as f64),
        );
        family(
            "oubliette_callers_held",
            "gauge",
            "Open streams, polls and waits that mark callers as present.",
            rows.into(),
        );
        let label = |provider: &str| provider.replace(['\\', '"', '\n'], "_");
        let rows = gauges.providers.iter().map(|used| {
            (
                format!("{{provider=\"{}\"}}", label(&used.provider)),
                used.totals.requests as f64,
            )
        });
        family(
            "oubliette_model_requests_total",
            "counter",
            "Requests that model providers answered.",
            rows.collect(),
        );
        let rows = gauges.providers.iter().flat_map(|used| {
            let kinds = [
                ("input", used.totals.input_tokens),
                ("output", used.totals.output_tokens),
                ("cached", used.totals.cached_tokens),
            ];
            let provider = label(&used.provider);
            kinds.map(|(kind, n)| (format!("{{provider=\"{provider}\",kind=\"{kind}\"}}"), n as f64))
        });
        family(
            "oubliette_model_tokens_total",
            "counter",
            "Tokens that models used; cached ones are part of input.",
            rows.collect(),
        );
        let rows = gauges.providers.iter().filter_map(|used| {
            let cost = used.totals.cost_usd?.as_usd();
            Some((format!("{{provider=\"{}\"}}", label(&used.provider)), cost))
        });
        family(
            "oubliette_model_cost_usd_total",
            "counter",
            "Cost of models that have a price, in US dollars.",
            rows.collect(),
        );
        family(
            "oubliette_tasks",
            "gauge",
            "Tasks of the runtime.",
            one(gauges.tasks as f64),
        );
        family(
            "oubliette_uptime_seconds",
            "gauge",
            "Seconds since the start.",
            one(gauges.uptime),
        );
        let build = format!(
            "{{version=\"{}\",build=\"{}\"}}",
            env!("CARGO_PKG_VERSION"),
            escape_label(env!("OUBLIETTE_BUILD"))
        );
        family(
            "oubliette_build_info",
            "gauge",
            "Version and build; always 1.",
            vec![(build, 1.0)],
        );
        family(
            "oubliette_database_bytes",
            "gauge",
            "Size of the database: SQLite's files, or the whole PostgreSQL database.",
            one(gauges.database_bytes as f64),
        );
        if let Some((size, free)) = gauges.disk {
            family(
                "oubliette_disk_bytes",
                "gauge",
                "Size of the home's file system.",
                one(size as f64),
            );
            family(
                "oubliette_disk_free_bytes",
                "gauge",
                "What is free of the home's file system.",
                one(free as f64),
            );
        }
        if let Some(bytes) = resident_bytes() {
            family(
                "process_resident_memory_bytes",
                "gauge",
                "Resident memory.",
                one(bytes as f64),
            );
        }
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            family(
                "process_open_fds",
                "gauge",
                "Open descriptors.",
                one(open.count() as f64),
            );
        }
        self.action_times.write_to(&mut out);
        self.commit_times.write_to(&mut out);
        self.calls.write_to(&mut out);
        match &gauges.server_address {
            Some(address) => with_label(&out, SERVER_LABEL, address),
            None => out,
        }
    }
}

/// The label that tells servers of a cluster apart. Not `server`, which tool calls have for their tool server.
pub(crate) const SERVER_LABEL: &str = "server_address";

/// The same text with one more label at every sample.
fn with_label(text: &str, label: &str, value: &str) -> String {
    let label = format!("{label}=\"{}\"", escape_label(value));
    let mut out = String::with_capacity(text.len() * 2);
    for line in text.lines() {
        // A name has neither a brace nor a space.
        match line.split_once(['{', ' ']) {
            Some(_) if line.starts_with('#') => out.push_str(line),
            Some((name, rest)) if line[name.len()..].starts_with('{') => {
                let _ = write!(out, "{name}{{{label},{rest}");
            }
            Some((name, rest)) => {
                let _ = write!(out, "{name}{{{label}}} {rest}");
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// Size of a database and the files SQLite keeps beside it, in bytes.
pub(crate) fn database_bytes(path: &std::path::Path) -> u64 {
    let size = |suffix: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        std::fs::metadata(name).map_or(0, |found| found.len())
    };
    size("") + size("-wal")
}

/// Size of the file system of a path, and what is free of it, in bytes.
pub(crate) fn disk_space(path: &std::path::Path) -> Option<(u64, u64)> {
    let found = rustix::fs::statvfs(path).ok()?;
    Some((found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize))
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_come_out_as_prometheus_text() {
        let metrics = Metrics::default();
        metrics.count_request("mcp", 200);
        metrics.count_request("mcp", 200);
        metrics.count_action("project_list", None, Duration::from_millis(500));
        metrics.count_action("project_list", Some(ErrorCode::NotFound), Duration::ZERO);
        let text = metrics.to_prometheus_text(&MetricGauges {
            sessions: 3,
            ..MetricGauges::default()
        });
        assert!(
            text.contains("oubliette_http_requests_total{door=\"mcp\",status=\"200\"} 2\n"),
            "{text}"
        );
        assert!(text.contains("oubliette_actions_total{action=\"project_list\",outcome=\"not_found\"} 1\n"));
        assert!(text.contains("oubliette_sessions_live 3\n"));
    }

    #[test]
    fn samples_of_a_cluster_say_which_server_they_are_of() {
        let metrics = Metrics::default();
        metrics.count_request("mcp", 200);
        metrics.count_action("project_list", None, Duration::from_millis(500));
        let text = metrics.to_prometheus_text(&MetricGauges {
            sessions: 3,
            servers: 2,
            server_address: Some("https://one:1\"".into()),
            ..MetricGauges::default()
        });
        let label = "server_address=\"https://one:1\\\"\"";
        for sample in [
            format!("oubliette_http_requests_total{{{label},door=\"mcp\",status=\"200\"}} 1\n"),
            format!("oubliette_sessions_live{{{label}}} 3\n"),
            format!("oubliette_servers{{{label}}} 2\n"),
            "# TYPE oubliette_servers gauge\n".to_owned(),
        ] {
            assert!(text.contains(&sample), "{sample}: {text}");
        }
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        for sample in samples {
            assert_eq!(sample.matches(label).count(), 1, "{sample}");
        }
    }
}
