//! Counters and gauges of `/metrics`, in Prometheus text format.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use oubliette_protocol::ErrorCode;
use parking_lot::Mutex;

/// Counters of requests and actions since the start.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    actions: Mutex<BTreeMap<(&'static str, &'static str), ActionTotals>>,
}

/// How often an action ended with one outcome, and the time that took in total.
#[derive(Debug, Default, Clone, Copy)]
struct ActionTotals {
    count: u64,
    seconds: f64,
}

/// Values measured when `/metrics` is read.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
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
    /// Seconds since the start.
    pub uptime: f64,
}

impl Metrics {
    /// Counts an answered request.
    pub(crate) fn count_request(&self, door: &'static str, status: u16) {
        *self.requests.lock().entry((door, status)).or_default() += 1;
    }

    /// Counts an action that was performed or refused, and how long it took.
    pub(crate) fn count_action(&self, name: &'static str, error: Option<ErrorCode>, took: Duration) {
        let outcome = error.map_or("ok", ErrorCode::as_str);
        let mut actions = self.actions.lock();
        let timed = actions.entry((name, outcome)).or_default();
        timed.count += 1;
        timed.seconds += took.as_secs_f64();
    }

    /// All counters and gauges in Prometheus text format.
    pub(crate) fn to_prometheus_text(&self, gauges: &Gauges) -> String {
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
        out
    }
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
        let text = metrics.to_prometheus_text(&Gauges {
            sessions: 3,
            ..Gauges::default()
        });
        assert!(
            text.contains("oubliette_http_requests_total{door=\"mcp\",status=\"200\"} 2\n"),
            "{text}"
        );
        assert!(text.contains("oubliette_actions_total{action=\"project_list\",outcome=\"not_found\"} 1\n"));
        assert!(text.contains("oubliette_sessions_live 3\n"));
    }
}
