//! The model gateway over real sockets, with a provider on loopback.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use oubliette_egress::{GatewayLimits, ModelGateway, ModelProvider, ModelRequest, ModelSink};
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, UnixStream},
    sync::{Notify, mpsc},
};
use tokio_util::sync::CancellationToken;

/// Upper bound of every wait.
const SOON: Duration = Duration::from_secs(30);

/// A request as the provider received it.
#[derive(Debug, Clone)]
struct ReceivedRequest {
    method: String,
    uri: String,
    headers: http::HeaderMap,
    body: usize,
}

/// State of the provider's handler: where it reports requests, and the signal some responses wait for.
#[derive(Clone)]
struct ProviderState {
    received: mpsc::UnboundedSender<ReceivedRequest>,
    go: Arc<Notify>,
}

async fn provider_handler(State(state): State<ProviderState>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = body
        .into_data_stream()
        .fold(0, |sum, chunk| async move { sum + chunk.map_or(0, |c| c.len()) })
        .await;
    let uri = parts.uri.to_string();
    let seen = ReceivedRequest {
        method: parts.method.to_string(),
        uri: uri.clone(),
        headers: parts.headers,
        body,
    };
    state.received.send(seen).unwrap();
    if uri.contains("stream") {
        // The second event only comes once the test has read the first.
        let go = state.go.clone();
        let events =
            stream::once(async { Ok::<_, Infallible>("data: one\n\n") }).chain(stream::once(async move {
                go.notified().await;
                Ok("data: two\n\n")
            }));
        return ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response();
    }
    if uri.contains("wait") {
        state.go.notified().await;
    }
    if uri.contains("redirect") {
        return (http::StatusCode::FOUND, [("location", "http://169.254.169.254/")]).into_response();
    }
    if uri.contains("large") {
        let megabytes = stream::iter((0..4).map(|_| Ok::<_, Infallible>(vec![b'x'; 1 << 20])));
        return Body::from_stream(megabytes).into_response();
    }
    ([("set-cookie", "a=b"), ("x-request-id", "r1")], "{\"ok\":true}").into_response()
}

/// Records what the gateway reports: provider, path, status.
#[derive(Default)]
struct ReportRecorder(Mutex<Vec<(String, String, u16)>>, Notify);

impl ModelSink for ReportRecorder {
    fn model_request(&self, request: ModelRequest) {
        self.0
            .lock()
            .unwrap()
            .push((request.provider, request.path, request.status));
        self.1.notify_one();
    }
}

/// A gateway on a Unix socket, in front of a provider on loopback.
struct GatewayFixture {
    _dir: tempfile::TempDir,
    _nobody: TcpSocket,
    socket: std::path::PathBuf,
    received: mpsc::UnboundedReceiver<ReceivedRequest>,
    go: Arc<Notify>,
    recorder: Arc<ReportRecorder>,
    cancel: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

async fn gateway_fixture(limits: GatewayLimits) -> GatewayFixture {
    let (sender, seen) = mpsc::unbounded_channel();
    let go = Arc::new(Notify::new());
    let app = Router::new()
        .fallback(provider_handler)
        .with_state(ProviderState {
            received: sender,
            go: go.clone(),
        });
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", tcp.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(tcp, app).await.unwrap() });

    // Bound but not listening: connecting is refused, and the port stays reserved.
    let nobody = TcpSocket::new_v4().unwrap();
    nobody.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let closed = nobody.local_addr().unwrap();
    let mut extra = ModelProvider::new("vllm", format!("{base}/v1"));
    extra.allow_paths = vec!["stream".into(), "wait".into(), "redirect".into(), "large".into()];
    let providers = vec![
        ModelProvider::new("anthropic", base.clone()).with_key("sk-ant-secret".to_owned().into()),
        ModelProvider::new("openai", format!("{base}/v1")).with_key("sk-openai-secret".to_owned().into()),
        ModelProvider::new("notls", base.replace("http:", "https:"))
            .with_key("sk-tls-secret".to_owned().into()),
        ModelProvider::new("gemini", base).with_key("goog-secret".to_owned().into()),
        ModelProvider::new("down", format!("http://{closed}")).with_key("sk-down-secret".to_owned().into()),
        extra,
    ];
    let gateway = ModelGateway::new(providers, limits).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("model.sock");
    let worker = DescriptorWorker::default();
    let listener = UntrustedListener::bind(&socket, PassedDescriptors::Refused, worker).unwrap();
    let (heard, cancel) = (Arc::new(ReportRecorder::default()), CancellationToken::new());
    let serving = tokio::spawn(gateway.serve(listener, heard.clone(), cancel.clone()));
    GatewayFixture {
        _dir: dir,
        _nobody: nobody,
        socket,
        received: seen,
        go,
        recorder: heard,
        cancel,
        serving,
    }
}

impl GatewayFixture {
    async fn connect(&self, head: &str, body: &[u8]) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).await.unwrap();
        let length = if body.is_empty() {
            String::new()
        } else {
            format!("content-length: {}\r\n", body.len())
        };
        let head = format!("{head}\r\nhost: 127.0.0.1:19999\r\nconnection: close\r\n{length}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        // A gateway that refuses early may close before it has read all of this.
        let _refused = stream.write_all(body).await;
        stream
    }

    async fn ask(&self, head: &str, body: &[u8]) -> (u16, String) {
        let mut stream = self.connect(head, body).await;
        let mut answer = Vec::new();
        let _broken_off = tokio::time::timeout(SOON, stream.read_to_end(&mut answer))
            .await
            .expect("silence");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
        (status, answer)
    }

    async fn next_received(&mut self) -> ReceivedRequest {
        tokio::time::timeout(SOON, self.received.recv())
            .await
            .expect("nothing was passed on")
            .unwrap()
    }

    async fn wait_reports(&self, count: usize) -> Vec<(String, String, u16)> {
        let wait = async {
            while self.recorder.0.lock().unwrap().len() < count {
                self.recorder.1.notified().await;
            }
        };
        tokio::time::timeout(SOON, wait).await.expect("not reported");
        self.recorder.0.lock().unwrap().clone()
    }
}

async fn read_until(stream: &mut UnixStream, text: &str) -> String {
    let mut got = String::new();
    let mut buffer = [0; 4096];
    while !got.contains(text) {
        let count = tokio::time::timeout(SOON, stream.read(&mut buffer))
            .await
            .expect("silence")
            .unwrap();
        assert!(count > 0, "ended with {got:?}");
        got.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    got
}

#[tokio::test]
async fn each_provider_gets_its_key_and_never_the_clients_credentials() {
    let mut fixture = gateway_fixture(GatewayLimits::default()).await;
    let mine = "authorization: Bearer mine\r\nx-api-key: mine\r\nx-goog-api-key: mine\r\ncookie: mine=1\r\n\
                content-type: application/json\r\nproxy-authorization: mine";
    for (path, uri, header, value) in [
        (
            "/anthropic/v1/messages?beta=true&key=mine",
            "/v1/messages?beta=true",
            "x-api-key",
            "sk-ant-secret",
        ),
        (
            "/openai/v1/chat/completions",
            "/v1/chat/completions",
            "authorization",
            "Bearer sk-openai-secret",
        ),
        (
            "/gemini/v1beta/models/g:streamGenerateContent?alt=sse&key=mine",
            "/v1beta/models/g:streamGenerateContent?alt=sse",
            "x-goog-api-key",
            "goog-secret",
        ),
    ] {
        let ask = format!("POST {path} HTTP/1.1\r\n{mine}");
        let mut stream = fixture.connect(&ask, b"{}").await;
        let seen = fixture.next_received().await;
        assert_eq!(
            (seen.method.as_str(), seen.uri.as_str(), seen.body),
            ("POST", uri, 2)
        );
        assert_eq!(seen.headers[header], value);
        assert!(
            !format!("{:?}", seen.headers).contains("mine"),
            "{:?}",
            seen.headers
        );
        assert_eq!(seen.headers["content-type"], "application/json");
        assert_eq!(seen.headers["content-length"], "2");
        assert_ne!(seen.headers["host"], "127.0.0.1:19999");
        assert_eq!(
            seen.headers.contains_key("anthropic-version"),
            header == "x-api-key"
        );
        fixture.go.notify_one();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(
            !answer.contains("set-cookie") && !answer.contains("secret"),
            "{answer}"
        );
    }
    let heard = fixture.wait_reports(3).await;
    assert_eq!(heard[0], ("anthropic".into(), "/v1/messages".into(), 200));
    assert_eq!(
        heard[2],
        (
            "gemini".into(),
            "/v1beta/models/g:streamGenerateContent".into(),
            200
        )
    );
}

#[tokio::test]
async fn a_response_is_streamed_without_buffering() {
    let mut fixture = gateway_fixture(GatewayLimits::default()).await;
    let mut stream = fixture.connect("POST /vllm/stream HTTP/1.1", b"{}").await;
    let first = read_until(&mut stream, "data: one").await;
    assert!(
        first.contains("text/event-stream") && !first.contains("data: two"),
        "{first}"
    );
    assert!(
        fixture.recorder.0.lock().unwrap().is_empty(),
        "reported when it is over"
    );
    fixture.go.notify_one();
    read_until(&mut stream, "data: two").await;
    assert_eq!(
        fixture.wait_reports(1).await,
        [("vllm".into(), "/stream".into(), 200)]
    );
    assert!(
        !fixture
            .next_received()
            .await
            .headers
            .contains_key("authorization"),
        "no key configured, none sent"
    );
}

#[tokio::test]
async fn requests_that_are_no_model_calls_are_not_forwarded() {
    let mut fixture = gateway_fixture(GatewayLimits::default()).await;
    for (head, status, says) in [
        ("POST /openai/v1/files HTTP/1.1", 403, "chat/completions"),
        ("DELETE /openai/v1/models/gpt HTTP/1.1", 405, "takes GET"),
        (
            "POST /nobody/v1/messages HTTP/1.1",
            404,
            "anthropic, down, gemini, notls, openai, vllm",
        ),
        ("POST /openai/v1/../v1/messages HTTP/1.1", 400, "dots"),
        ("POST /openai/v1%2fmessages HTTP/1.1", 400, "characters"),
        ("POST //openai/v1/messages HTTP/1.1", 400, ""),
        ("POST http://openai/v1/messages HTTP/1.1", 400, "not a proxy"),
        ("CONNECT openai:443 HTTP/1.1", 400, ""),
    ] {
        let (got, answer) = fixture.ask(head, b"").await;
        assert_eq!(got, status, "{head}: {answer}");
        assert!(answer.contains(says), "{head}: {answer}");
    }
    assert!(fixture.received.try_recv().is_err(), "something was passed on");
    assert_eq!(fixture.wait_reports(8).await.len(), 8);
}

#[tokio::test]
async fn provider_errors_are_reported_without_secrets() {
    let mut fixture = gateway_fixture(GatewayLimits::default()).await;
    let (status, answer) = fixture.ask("POST /down/v1/messages HTTP/1.1", b"{}").await;
    assert_eq!(status, 502);
    assert!(
        answer.contains("cannot be reached") && !answer.contains("secret"),
        "{answer}"
    );
    assert!(
        answer.contains("x-should-retry: false"),
        "nobody listens there: {answer}"
    );
    let (status, answer) = fixture.ask("POST /notls/v1/messages HTTP/1.1", b"{}").await;
    assert_eq!(status, 502);
    assert!(!answer.contains("x-should-retry"), "{answer}");
    assert!(
        answer.contains("cannot be reached") && !answer.contains("secret"),
        "{answer}"
    );
    let (status, answer) = fixture.ask("POST /vllm/redirect HTTP/1.1", b"{}").await;
    assert_eq!(status, 502);
    assert!(
        answer.contains("not followed") && !answer.contains("169.254"),
        "{answer}"
    );
    assert!(answer.contains("x-should-retry: false"), "{answer}");
    fixture.next_received().await;
    assert!(fixture.received.try_recv().is_err(), "the redirect was followed");
}

#[tokio::test]
async fn request_and_response_sizes_are_limited() {
    let limits = GatewayLimits {
        request_bytes: 1 << 20,
        response_bytes: 2 << 20,
        ..GatewayLimits::default()
    };
    let mut fixture = gateway_fixture(limits).await;
    let (status, answer) = fixture
        .ask("POST /openai/v1/responses HTTP/1.1", &vec![b'x'; (1 << 20) + 1])
        .await;
    assert_eq!(status, 413, "{answer}");
    let mut chunked = fixture
        .connect(
            "POST /openai/v1/responses HTTP/1.1\r\ntransfer-encoding: chunked",
            b"",
        )
        .await;
    let chunk = format!("100000\r\n{}\r\n", "x".repeat(1 << 20));
    let _refused = chunked.write_all(chunk.repeat(2).as_bytes()).await;
    let _refused = chunked.write_all(b"0\r\n\r\n").await;
    assert!(read_until(&mut chunked, "HTTP/1.1 ").await.contains("413"));
    let (status, answer) = fixture
        .ask("POST /openai/v1/responses HTTP/1.1", &vec![b'x'; 1 << 20])
        .await;
    assert_eq!(status, 200, "{answer}");
    loop {
        if fixture.next_received().await.body == 1 << 20 {
            break;
        }
    }
    let (status, answer) = fixture.ask("POST /vllm/large HTTP/1.1", b"{}").await;
    assert_eq!(status, 200);
    assert!(
        answer.len() < 3 << 20 && !answer.ends_with("0\r\n\r\n"),
        "an answer cut short must not look whole"
    );
}

#[tokio::test]
async fn requests_of_a_session_are_limited() {
    let limits = GatewayLimits {
        concurrent: 1,
        per_session: Some(2),
        ..GatewayLimits::default()
    };
    let mut fixture = gateway_fixture(limits).await;
    let mut waiting = fixture.connect("POST /vllm/wait HTTP/1.1", b"{}").await;
    fixture.next_received().await;
    let (status, answer) = fixture.ask("POST /openai/v1/responses HTTP/1.1", b"{}").await;
    assert_eq!(status, 429, "{answer}");
    assert!(answer.contains("retry-after"), "{answer}");
    fixture.go.notify_one();
    read_until(&mut waiting, "ok").await;
    fixture.wait_reports(2).await;
    assert_eq!(
        fixture.ask("POST /openai/v1/responses HTTP/1.1", b"{}").await.0,
        200
    );
    fixture.wait_reports(3).await;
    let (status, answer) = fixture.ask("POST /openai/v1/responses HTTP/1.1", b"{}").await;
    assert_eq!(status, 429);
    assert!(answer.contains("used up its 2"), "{answer}");
    assert!(
        answer.contains("x-should-retry: false") && !answer.contains("retry-after"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_request_to_a_hanging_provider_times_out() {
    let limits = GatewayLimits {
        total: Duration::from_millis(50),
        ..GatewayLimits::default()
    };
    let fixture = gateway_fixture(limits).await;
    let (status, answer) = fixture.ask("POST /vllm/wait HTTP/1.1", b"{}").await;
    assert_eq!(status, 504, "{answer}");
}

#[tokio::test]
async fn cancelling_closes_listener_and_connections() {
    let mut fixture = gateway_fixture(GatewayLimits::default()).await;
    let mut stream = fixture.connect("POST /vllm/stream HTTP/1.1", b"{}").await;
    read_until(&mut stream, "data: one").await;
    fixture.next_received().await;
    fixture.cancel.cancel();
    tokio::time::timeout(SOON, &mut fixture.serving)
        .await
        .expect("it goes on")
        .unwrap();
    let mut rest = Vec::new();
    let _reset = stream.read_to_end(&mut rest).await;
    assert!(UnixStream::connect(&fixture.socket).await.is_err());
    assert_eq!(fixture.wait_reports(1).await[0].2, 200);
}

#[tokio::test]
async fn invalid_providers_are_refused_at_start() {
    for (name, url, says) in [
        ("a/b", "http://x", "letters"),
        ("a", "ftp://x", "http"),
        ("a", "http://user:pw@x", "api_key_env"),
        ("a", "not a url", "base_url"),
    ] {
        let error =
            ModelGateway::new(vec![ModelProvider::new(name, url)], GatewayLimits::default()).unwrap_err();
        assert!(error.message.contains(says), "{}", error.message);
    }
    let broken = ModelProvider::new("a", "http://x").with_key("line\nbreak".to_owned().into());
    let error = ModelGateway::new(vec![broken], GatewayLimits::default()).unwrap_err();
    assert!(
        !error.message.contains("line\nbreak") && error.message.contains("line break"),
        "{}",
        error.message
    );
}
