//! [`ProxyClient`]: whose connections a proxy socket carries, where they may go, and who is told of them.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use http::StatusCode;
use jiff::Timestamp;
use oubliette_protocol::{debug::ServiceRequest, egress::HostPattern};
use tokio::time::Instant;

use crate::refusal::EgressRefusal;

/// Receives a record of each connection, for the debugger. Never given a secret.
pub trait EgressSink: Send + Sync {
    /// One connection, or one request to a service, is over or was refused.
    fn record(&self, record: EgressRecord);
}

/// A connection through the proxy or a request to a service, after its end.
#[derive(Debug, Clone, PartialEq)]
pub struct EgressRecord {
    /// The host that was asked for: a name or an address, at most 253 bytes.
    pub host: String,
    /// The port that was asked for.
    pub port: u16,
    /// Whether the rules let it through.
    pub allowed: bool,
    /// The entry that allowed it, if a list had to.
    pub rule: Option<String>,
    /// Bytes from the host into the sandbox.
    pub bytes_in: u64,
    /// Bytes from the sandbox to the host.
    pub bytes_out: u64,
    /// When it began.
    pub started: Timestamp,
    /// How long it took.
    pub duration: Duration,
    /// Why it was refused or failed.
    pub error: Option<String>,
    /// The request, if it was to a service.
    pub request: Option<ServiceRequest>,
}

/// The only hosts that a client reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressList {
    /// The hosts.
    pub hosts: Vec<HostPattern>,
    /// Where the list is written, for the answer to a refused request: `sandbox.egress in agents/x/agent.json`.
    pub setting: String,
}

/// Whose connections a socket carries.
pub struct ProxyClient {
    /// A connection must be allowed by each of them.
    lists: ArcSwap<Vec<EgressList>>,
    sink: Arc<dyn EgressSink>,
}

impl ProxyClient {
    /// A client that reaches only hosts that are in each of `lists`; without a list, every host that the proxy allows.
    pub fn new(lists: Vec<EgressList>, sink: Arc<dyn EgressSink>) -> Arc<Self> {
        Arc::new(Self {
            lists: ArcSwap::from_pointee(lists),
            sink,
        })
    }

    /// Replaces the lists. Connections that are open stay open.
    pub fn set_lists(&self, lists: Vec<EgressList>) {
        self.lists.store(Arc::new(lists));
    }

    /// Checks a target against the lists. Returns the entry of the first list that allows it.
    pub(crate) fn check(&self, host: &str, port: u16) -> Result<Option<String>, EgressRefusal> {
        let mut rule = None;
        for list in self.lists.load().iter() {
            let Some(entry) = list.hosts.iter().find(|entry| entry.matches(host, port)) else {
                let target = match host.contains(':') {
                    true => format!("[{host}]:{port}"),
                    false => format!("{host}:{port}"),
                };
                return Err(EgressRefusal::new(
                    StatusCode::FORBIDDEN,
                    "not_allowed",
                    format!(
                        "the sandbox may not connect to {target}: {} does not list it; add \"{target}\" there to allow it",
                        list.setting
                    ),
                ));
            };
            rule.get_or_insert_with(|| entry.as_str().to_owned());
        }
        Ok(rule)
    }

    /// A report of a connection that begins now.
    pub(crate) fn report(&self, host: &str, port: u16) -> EgressReport {
        EgressReport::new(self.sink.clone(), host.to_owned(), port)
    }
}

/// Records a connection when dropped: after the last byte, or when it was refused or broken off.
pub(crate) struct EgressReport {
    sink: Arc<dyn EgressSink>,
    since: Instant,
    /// What is known so far.
    pub(crate) record: EgressRecord,
}

impl EgressReport {
    pub(crate) fn new(sink: Arc<dyn EgressSink>, host: String, port: u16) -> Self {
        Self {
            sink,
            since: Instant::now(),
            record: EgressRecord {
                host,
                port,
                allowed: false,
                rule: None,
                bytes_in: 0,
                bytes_out: 0,
                started: oubliette_protocol::now(),
                duration: Duration::ZERO,
                error: Some("broken off before it was decided".to_owned()),
                request: None,
            },
        }
    }

    /// The rules let it through.
    pub(crate) fn allow(&mut self, rule: Option<String>) {
        (self.record.allowed, self.record.rule, self.record.error) = (true, rule, None);
    }
}

impl Drop for EgressReport {
    fn drop(&mut self) {
        self.record.duration = self.since.elapsed();
        self.sink.record(self.record.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NullSink;

    impl EgressSink for NullSink {
        fn record(&self, _: EgressRecord) {}
    }

    fn list(hosts: &[&str], setting: &str) -> EgressList {
        EgressList {
            hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
            setting: setting.into(),
        }
    }

    #[test]
    fn a_host_must_be_in_every_list() {
        let client = ProxyClient::new(
            vec![
                list(&["a.org", "*.b.org:443"], "here"),
                list(&["*.org", "x.b.org"], "above"),
            ],
            Arc::new(NullSink),
        );
        assert_eq!(client.check("a.org", 80).unwrap().as_deref(), Some("a.org"));
        assert_eq!(
            client.check("x.b.org", 443).unwrap().as_deref(),
            Some("*.b.org:443")
        );
        let refused = client.check("x.b.org", 80).unwrap_err().message;
        assert!(
            refused.contains("here") && refused.contains("\"x.b.org:80\""),
            "{refused}"
        );
        client.set_lists(vec![list(&["a.com"], "here"), list(&["b.com"], "above")]);
        assert!(client.check("a.com", 80).unwrap_err().message.contains("above"));
        assert!(client.check("::1", 80).unwrap_err().message.contains("[::1]:80"));
        client.set_lists(vec![list(&[], "nothing")]);
        assert!(client.check("a.com", 80).is_err());
        client.set_lists(Vec::new());
        assert_eq!(client.check("a.com", 80).unwrap(), None);
    }
}
