//! The way to the collector: OTLP over HTTP, in its JSON form. A collector that is slow or gone costs
//! spans, and one warning.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::{Error, Result};
use reqwest::{Client, Url, redirect};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::span::Span;

/// Spans that may wait; more are dropped.
const QUEUE: usize = 1024;
/// Spans sent together.
const BATCH: usize = 256;
/// How long they are gathered.
const GATHER: Duration = Duration::from_secs(1);
/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where spans go.
#[derive(Debug, Clone)]
pub struct Collector {
    url: Url,
}

impl Collector {
    /// Reads `[otlp] endpoint`, the base URL as other exporters take it.
    pub fn parse(endpoint: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(format!(
                "[otlp] endpoint {why}: use the base URL of an OTLP/HTTP collector, like \"http://127.0.0.1:4318\""
            ))
        };
        let mut url = Url::parse(endpoint).map_err(|e| bad(&format!("is no URL ({e})")))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(bad("is not http:// or https://"));
        }
        let base = url.path().trim_end_matches('/');
        if !base.ends_with("/v1/traces") {
            url.set_path(&format!("{base}/v1/traces"));
        }
        Ok(Self { url })
    }

    /// The queue, and what empties it until nobody fills it any more.
    pub(super) fn open(self) -> Result<(Outbox, impl Future<Output = ()> + Send + use<>)> {
        let mut builder = Client::builder()
            .redirect(redirect::Policy::none())
            .timeout(PATIENCE)
            .pool_max_idle_per_host(1);
        if self.url.scheme() == "http" {
            // No root certificates are read that nobody needs.
            builder = builder.tls_certs_only([]);
        }
        if matches!(self.url.host_str(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|e| {
            Error::unavailable("connections to the collector of [otlp] endpoint cannot be prepared")
                .with_log(e)
        })?;
        let (sender, waiting) = mpsc::channel(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let outbox = Outbox {
            sender,
            dropped: dropped.clone(),
        };
        Ok((outbox, send(waiting, dropped, client, self.url)))
    }
}

/// The near end of the queue.
pub(super) struct Outbox {
    sender: mpsc::Sender<Span>,
    dropped: Arc<AtomicU64>,
}

impl Outbox {
    /// Never waits.
    pub(super) fn push(&self, span: Span) {
        if self.sender.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn send(mut waiting: mpsc::Receiver<Span>, dropped: Arc<AtomicU64>, client: Client, url: Url) {
    let mut failing = false;
    let mut batch = Vec::new();
    while waiting.recv_many(&mut batch, BATCH).await > 0 {
        let more = async {
            while batch.len() < BATCH {
                let room = BATCH - batch.len();
                if waiting.recv_many(&mut batch, room).await == 0 {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(GATHER, more).await;
        let count = batch.len() as u64;
        let body = request(batch.drain(..).map(Span::json).collect());
        let answer = client.post(url.clone()).json(&body).send().await;
        match answer.and_then(reqwest::Response::error_for_status) {
            Ok(_) => {
                failing = false;
                let dropped = dropped.swap(0, Ordering::Relaxed);
                if dropped > 0 {
                    tracing::info!(dropped, "the collector takes spans again");
                }
            }
            Err(error) => {
                dropped.fetch_add(count, Ordering::Relaxed);
                if !std::mem::replace(&mut failing, true) {
                    let (error, host) = (error.without_url(), url.host_str().unwrap_or_default());
                    tracing::warn!(%error, host, "the collector takes no spans; they are dropped until it does");
                }
            }
        }
    }
}

fn request(spans: Vec<Value>) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({ "resourceSpans": [{
        "resource": { "attributes": [
            { "key": "service.name", "value": { "stringValue": "oubliette" } },
            { "key": "service.version", "value": { "stringValue": version } },
        ] },
        "scopeSpans": [{ "scope": { "name": "oubliette", "version": version }, "spans": spans }],
    }] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_base_url() {
        let url = |text| Collector::parse(text).unwrap().url.to_string();
        assert_eq!(url("http://127.0.0.1:4318"), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(url("https://c.example/otlp/"), "https://c.example/otlp/v1/traces");
        assert_eq!(url("http://c.example/v1/traces"), "http://c.example/v1/traces");
        for bad in ["", "127.0.0.1:4318", "grpc://c.example", "http://"] {
            assert!(
                Collector::parse(bad)
                    .unwrap_err()
                    .message
                    .contains("[otlp] endpoint"),
                "{bad}"
            );
        }
    }
}
