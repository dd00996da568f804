//! Sends spans to the collector as OTLP over HTTP, in its JSON form. While the collector is slow or unreachable spans
//! are dropped, with one warning.

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

use super::span::OtlpSpan;

/// Maximum number of spans waiting to be sent; further ones are dropped.
const SPAN_QUEUE_MAX: usize = 1024;
/// Maximum number of spans in one request.
const SPAN_BATCH_MAX: usize = 256;
/// How long spans are collected before a request.
const SPAN_BATCH_WAIT: Duration = Duration::from_secs(1);
/// How long one request to the collector may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The OTLP collector spans are sent to.
#[derive(Debug, Clone)]
pub(crate) struct OtlpCollector {
    url: Url,
}

impl OtlpCollector {
    /// Parses `[otlp] endpoint`: a base URL, as other OTLP exporters take it; `/v1/traces` is appended if missing.
    pub(crate) fn parse(endpoint: &str) -> Result<Self> {
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

    /// The queue, and the future that sends what is queued until the queue is dropped.
    pub(super) fn connect(self) -> Result<(SpanQueue, impl Future<Output = ()> + Send + use<>)> {
        let mut builder = Client::builder()
            .redirect(redirect::Policy::none())
            .timeout(REQUEST_TIMEOUT)
            .pool_max_idle_per_host(1);
        if self.url.scheme() == "http" {
            // Plain HTTP needs no root certificates, so none are loaded.
            builder = builder.tls_certs_only([]);
        }
        if matches!(self.url.host_str(), Some("localhost" | "127.0.0.1" | "[::1]")) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|e| {
            Error::unavailable("connections to the collector of [otlp] endpoint cannot be prepared")
                .with_cause(e)
        })?;
        let (sender, waiting) = mpsc::channel(SPAN_QUEUE_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let queue = SpanQueue {
            sender,
            dropped: dropped.clone(),
        };
        Ok((queue, send_spans(waiting, dropped, client, self.url)))
    }
}

/// The sending end of the queue of spans.
pub(super) struct SpanQueue {
    sender: mpsc::Sender<OtlpSpan>,
    dropped: Arc<AtomicU64>,
}

impl SpanQueue {
    /// Queues a span, or counts it as dropped if the queue is full. Never waits.
    pub(super) fn push_or_drop(&self, span: OtlpSpan) {
        if self.sender.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn send_spans(
    mut waiting: mpsc::Receiver<OtlpSpan>,
    dropped: Arc<AtomicU64>,
    client: Client,
    url: Url,
) {
    let mut failing = false;
    let mut batch = Vec::new();
    while waiting.recv_many(&mut batch, SPAN_BATCH_MAX).await > 0 {
        let more = async {
            while batch.len() < SPAN_BATCH_MAX {
                let room = SPAN_BATCH_MAX - batch.len();
                if waiting.recv_many(&mut batch, room).await == 0 {
                    break;
                }
            }
        };
        let _ = tokio::time::timeout(SPAN_BATCH_WAIT, more).await;
        let count = batch.len() as u64;
        let body = export_request(batch.drain(..).map(OtlpSpan::into_json).collect());
        let answer = client.post(url.clone()).json(&body).send().await;
        match answer.and_then(reqwest::Response::error_for_status) {
            Ok(_) => {
                failing = false;
                let dropped = dropped.swap(0, Ordering::Relaxed);
                if dropped > 0 {
                    tracing::info!(dropped, "the OTLP collector accepts spans again");
                }
            }
            Err(error) => {
                dropped.fetch_add(count, Ordering::Relaxed);
                if !std::mem::replace(&mut failing, true) {
                    let (error, host) = (error.without_url(), url.host_str().unwrap_or_default());
                    tracing::warn!(%error, host, "sending spans to the OTLP collector failed; they are dropped until it accepts them again");
                }
            }
        }
    }
}

fn export_request(spans: Vec<Value>) -> Value {
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
        let url = |text| OtlpCollector::parse(text).unwrap().url.to_string();
        assert_eq!(url("http://127.0.0.1:4318"), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(url("https://c.example/otlp/"), "https://c.example/otlp/v1/traces");
        assert_eq!(url("http://c.example/v1/traces"), "http://c.example/v1/traces");
        for bad in ["", "127.0.0.1:4318", "grpc://c.example", "http://"] {
            assert!(
                OtlpCollector::parse(bad)
                    .unwrap_err()
                    .message
                    .contains("[otlp] endpoint"),
                "{bad}"
            );
        }
    }
}
