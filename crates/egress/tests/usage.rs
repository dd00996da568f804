//! What the gateway reports of the answers that pass it, over real sockets, with a provider on loopback.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use oubliette_egress::{GatewayLimits, ModelGateway, ModelProvider, ModelRequest, ModelSink};
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener};
use oubliette_protocol::{Error, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

/// Upper bound of every wait.
const SOON: Duration = Duration::from_secs(60);

struct Recorder {
    requests: mpsc::UnboundedSender<ModelRequest>,
    is_spent: AtomicBool,
    refused: AtomicU32,
}

#[async_trait]
impl ModelSink for Recorder {
    async fn admit(&self) -> Result<()> {
        match self.is_spent.load(Ordering::SeqCst) {
            true => Err(Error::limit_exceeded("nothing is left")),
            false => Ok(()),
        }
    }

    async fn count_refused(&self, _: &Error) -> u32 {
        self.refused.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn model_request(&self, request: ModelRequest) {
        let _ = self.requests.send(request);
    }
}

/// A gateway in front of a provider that the test itself plays, connection by connection.
struct Fixture {
    _dir: tempfile::TempDir,
    socket: std::path::PathBuf,
    provider: TcpListener,
    sink: Arc<Recorder>,
    reported: mpsc::UnboundedReceiver<ModelRequest>,
    _stop: tokio_util::sync::DropGuard,
}

async fn fixture() -> Fixture {
    let provider = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", provider.local_addr().unwrap());
    let gateway = ModelGateway::new(vec![ModelProvider::new("p", base)], GatewayLimits::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("model.sock");
    let worker = DescriptorWorker::default();
    let listener = UntrustedListener::bind(&socket, PassedDescriptors::Refused, worker).unwrap();
    let (requests, reported) = mpsc::unbounded_channel();
    let sink = Arc::new(Recorder {
        requests,
        is_spent: AtomicBool::new(false),
        refused: AtomicU32::new(0),
    });
    let stop = CancellationToken::new();
    tokio::spawn(gateway.serve(listener, sink.clone(), stop.clone()));
    Fixture {
        _dir: dir,
        socket,
        provider,
        sink,
        reported,
        _stop: stop.drop_guard(),
    }
}

impl Fixture {
    async fn ask(&self, path: &str) -> UnixStream {
        let body = r#"{"model":"m","messages":[]}"#;
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        let head = format!(
            "POST /p{path} HTTP/1.1\r\nhost: x\r\naccept-encoding: gzip, br\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    /// Takes the provider's next connection and reads the request; returns its head too.
    async fn accept(&self) -> (tokio::net::TcpStream, String) {
        let (mut stream, _) = tokio::time::timeout(SOON, self.provider.accept())
            .await
            .unwrap()
            .unwrap();
        let head = read_until(&mut stream, "[]}").await;
        (stream, head)
    }

    async fn report(&mut self) -> ModelRequest {
        tokio::time::timeout(SOON, self.reported.recv())
            .await
            .unwrap()
            .unwrap()
    }
}

async fn read_until(stream: &mut (impl AsyncReadExt + Unpin), text: &str) -> String {
    let (mut got, mut buffer) = (String::new(), [0; 4096]);
    while !got.contains(text) {
        let count = tokio::time::timeout(SOON, stream.read(&mut buffer))
            .await
            .unwrap()
            .unwrap();
        assert!(count > 0, "ended with {got:?}");
        got.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    got
}

async fn read_body(stream: &mut UnixStream) -> String {
    let mut body = String::new();
    tokio::time::timeout(SOON, stream.read_to_string(&mut body))
        .await
        .unwrap()
        .unwrap();
    body
}

const STREAM_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn usage_is_reported_with_the_last_event_and_holds_nothing_back() {
    let mut fixture = fixture().await;
    let mut client = fixture.ask("/v1/chat/completions").await;
    let (mut provider, head) = fixture.accept().await;
    assert!(head.contains("accept-encoding: identity"), "{head}");
    provider.write_all(STREAM_HEAD).await.unwrap();
    // Half an event: it arrives before the other half is sent.
    provider
        .write_all(b"data: {\"choices\":[{\"delta\":{\"content\":\"he")
        .await
        .unwrap();
    read_until(&mut client, "\"he").await;
    provider
        .write_all(b"llo\"}}]}\n\ndata: {\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":3}}\n\ndata: [DONE]\n\n")
        .await
        .unwrap();
    read_until(&mut client, "[DONE]").await;
    // The provider has not closed the stream; that the client has the mark is enough.
    let usage = fixture.reported.try_recv().unwrap().usage.unwrap();
    assert_eq!(
        (
            usage.model.as_str(),
            usage.input_tokens,
            usage.output_tokens,
            usage.estimated
        ),
        ("m", 11, 3, false)
    );
    drop((provider, client));
    assert!(
        tokio::time::timeout(Duration::from_millis(50), fixture.reported.recv())
            .await
            .is_err(),
        "reported twice"
    );
}

#[tokio::test]
async fn a_cut_stream_is_reported_once_as_an_estimate() {
    let mut fixture = fixture().await;
    for side in ["provider", "client"] {
        let mut client = fixture.ask("/v1/messages").await;
        let (mut provider, _) = fixture.accept().await;
        provider.write_all(STREAM_HEAD).await.unwrap();
        let begun = b"data: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":1}}}\n\n";
        provider.write_all(begun).await.unwrap();
        provider
            .write_all(b"data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"eight ch")
            .await
            .unwrap();
        read_until(&mut client, "eight ch").await;
        match side {
            "client" => drop(client),
            _ => {
                // A reset, not an orderly end.
                provider.set_zero_linger().unwrap();
                drop(provider);
            }
        }
        let usage = fixture.report().await.usage.unwrap();
        assert_eq!(
            (usage.input_tokens, usage.output_tokens, usage.estimated),
            (9, 2, true),
            "{side}"
        );
    }
}

#[tokio::test]
async fn errors_use_nothing_and_what_asks_no_model_is_not_counted() {
    let mut fixture = fixture().await;
    let mut client = fixture.ask("/v1/responses").await;
    let (mut provider, _) = fixture.accept().await;
    provider
        .write_all(b"HTTP/1.1 500 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        .await
        .unwrap();
    read_until(&mut client, "{}").await;
    let report = fixture.report().await;
    let usage = report.usage.unwrap();
    assert_eq!(
        (report.status, usage.input_tokens, usage.estimated),
        (500, 0, false)
    );
    let mut client = fixture.ask("/v1/messages/count_tokens").await;
    let (mut provider, _) = fixture.accept().await;
    provider
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 18\r\nconnection: close\r\n\r\n{\"input_tokens\":5}")
        .await
        .unwrap();
    read_until(&mut client, "5}").await;
    assert!(fixture.report().await.usage.is_none());
    // Given up before the answer began: the provider had it.
    let client = fixture.ask("/v1/messages").await;
    let (_provider, _) = fixture.accept().await;
    drop(client);
    let report = fixture.report().await;
    let usage = report.usage.unwrap();
    assert_eq!(
        (
            report.status,
            usage.input_tokens,
            usage.output_tokens,
            usage.estimated
        ),
        (0, 7, 0, true)
    );
}

#[tokio::test]
async fn a_refused_request_is_answered_in_the_providers_own_form() {
    let mut fixture = fixture().await;
    fixture.sink.is_spent.store(true, Ordering::SeqCst);
    for (path, form) in [
        ("/v1/chat/completions", "\"code\":\"insufficient_quota\""),
        ("/v1/responses", "\"type\":\"insufficient_quota\""),
        ("/v1/messages", "\"type\":\"rate_limit_error\""),
        (
            "/v1beta/models/g:generateContent",
            "\"status\":\"RESOURCE_EXHAUSTED\"",
        ),
    ] {
        // The first of its turn.
        fixture.sink.refused.store(0, Ordering::SeqCst);
        let mut client = fixture.ask(path).await;
        let answer = read_until(&mut client, "\r\n\r\n").await + &read_body(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
        assert!(
            answer.contains(form) && answer.contains("nothing is left"),
            "{answer}"
        );
        assert!(
            answer.contains("x-should-retry: false") && !answer.contains("retry-after"),
            "{answer}"
        );
        let report = fixture.report().await;
        assert!(report.status == 429 && report.usage.is_none() && !report.admitted);
    }
}

#[tokio::test]
async fn a_client_that_asks_again_past_a_budget_is_refused_alike() {
    let mut fixture = fixture().await;
    fixture.sink.is_spent.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        let mut client = fixture.ask("/v1/messages").await;
        let answer = read_until(&mut client, "\r\n\r\n").await + &read_body(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
        assert!(answer.contains("x-should-retry: false"), "{answer}");
        assert_eq!(fixture.report().await.status, 429);
    }
    assert_eq!(fixture.sink.refused.load(Ordering::SeqCst), 3, "each is counted");
}
