//! One peer against raw lines: what it answers, byte for byte.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::sync::Arc;

use async_trait::async_trait;
use oubliette_relay::{
    CallError, CallOptions, CloseReason, PeerHandler, PeerLimits, ProgressReport, RequestContext, RpcError,
    RpcPeer,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf},
    sync::{Semaphore, mpsc},
    task::JoinHandle,
};

/// Serves the test methods: echoes, waits for a permit or cancellation, reports progress, panics; everything
/// that happened is sent to `heard`.
struct EchoHandler {
    gate: Semaphore,
    heard: mpsc::UnboundedSender<String>,
}

#[async_trait]
impl PeerHandler for EchoHandler {
    async fn connected(&self, peer: &RpcPeer) {
        peer.send_raw(&json!({"jsonrpc":"2.0","method":"hello","type":"hello","params":{}}))
            .await
            .unwrap();
    }

    async fn request(&self, method: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        match method {
            "echo" => Ok(params),
            "wait" => {
                self.heard.send(format!("waiting {}", context.id)).unwrap();
                tokio::select! {
                    permit = self.gate.acquire() => permit.unwrap().forget(),
                    () = context.cancel.cancelled() => {
                        self.heard.send(format!("cancelled {}", context.id)).unwrap();
                        return Err((&oubliette_protocol::Error::tool_error("cancelled")).into());
                    }
                }
                Ok(params)
            }
            "progress" => {
                context.report_progress(&ProgressReport {
                    progress: 0.5,
                    total: Some(1.0),
                    message: Some("half".into()),
                });
                Ok(Value::Null)
            }
            "panic" => panic!("on purpose"),
            "big" => Ok(Value::from("x".repeat(5_000))),
            _ => Err(oubliette_relay::error::method_not_found(method)),
        }
    }

    fn notification(&self, method: &str, params: Value, _: &RpcPeer) {
        self.heard.send(format!("{method} {params}")).unwrap();
    }
}

struct PeerFixture {
    out: WriteHalf<DuplexStream>,
    lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    handler: Arc<EchoHandler>,
    heard: mpsc::UnboundedReceiver<String>,
    peer: RpcPeer,
    ended: JoinHandle<CloseReason>,
}

const LINE: usize = 2_000;

async fn peer_fixture_with(limits: PeerLimits) -> PeerFixture {
    let (near, far) = tokio::io::duplex(64 * 1024);
    let (tx, heard) = mpsc::unbounded_channel();
    let handler = Arc::new(EchoHandler {
        gate: Semaphore::new(0),
        heard: tx,
    });
    let (peer, ended) = RpcPeer::spawn(far, handler.clone(), limits);
    let (read, out) = tokio::io::split(near);
    let mut fixture = PeerFixture {
        out,
        lines: BufReader::new(read).lines(),
        handler,
        heard,
        peer,
        ended,
    };
    assert_eq!(fixture.read().await["method"], "hello");
    fixture
}

async fn peer_fixture() -> PeerFixture {
    peer_fixture_with(PeerLimits {
        max_line_bytes: LINE,
        max_in_flight: 3,
        ..PeerLimits::default()
    })
    .await
}

impl PeerFixture {
    async fn send(&mut self, line: &str) {
        self.out.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    async fn read(&mut self) -> Value {
        serde_json::from_str(
            &self
                .lines
                .next_line()
                .await
                .unwrap()
                .expect("the connection ended"),
        )
        .unwrap()
    }

    async fn ask(&mut self, line: &str) -> Value {
        self.send(line).await;
        self.read().await
    }

    async fn hear(&mut self) -> String {
        self.heard.recv().await.unwrap()
    }
}

#[tokio::test]
async fn a_bad_line_is_answered_and_the_connection_lives_on() {
    let mut fixture = peer_fixture().await;
    for (line, code) in [
        ("{nonsense", -32700),
        ("7", -32600),
        ("[]", -32600),
        ("{}", -32600),
    ] {
        let answer = fixture.ask(line).await;
        assert_eq!(
            (&answer["id"], &answer["error"]["code"]),
            (&Value::Null, &json!(code)),
            "{line}"
        );
        assert_eq!(answer["error"]["data"]["code"], "invalid_argument");
    }
    fixture.send("").await;
    fixture.send("  \r").await;
    let answer = fixture
        .ask(r#"{"jsonrpc":"2.0","id":1,"method":"echo","params":[1]}"#)
        .await;
    assert_eq!(answer, json!({"jsonrpc":"2.0","id":1,"result":[1]}));
}

#[tokio::test]
async fn ids_come_back_as_they_were() {
    let mut fixture = peer_fixture().await;
    for id in [
        json!(0),
        json!(-5),
        json!(1.5),
        json!(u64::MAX),
        json!(""),
        json!("a\n\"b"),
        json!("7"),
    ] {
        let answer = fixture
            .ask(&json!({"jsonrpc":"2.0","id":id,"method":"echo"}).to_string())
            .await;
        assert_eq!(answer, json!({"jsonrpc":"2.0","id":id,"result":null}));
    }
    let answer = fixture
        .ask(r#"{"jsonrpc":"2.0","id":null,"method":"echo"}"#)
        .await;
    assert_eq!(answer["error"]["code"], -32600);
    let answer = fixture.ask(r#"{"jsonrpc":"2.0","id":1,"method":"nope"}"#).await;
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&json!(1), &json!(-32601))
    );
}

#[tokio::test]
async fn answers_come_as_they_are_ready() {
    let mut fixture = peer_fixture().await;
    fixture
        .send(r#"{"jsonrpc":"2.0","id":"slow","method":"wait"}"#)
        .await;
    assert_eq!(fixture.hear().await, r#"waiting "slow""#);
    assert_eq!(
        fixture
            .ask(r#"{"jsonrpc":"2.0","id":"fast","method":"echo"}"#)
            .await["id"],
        "fast"
    );
    fixture.handler.gate.add_permits(1);
    assert_eq!(fixture.read().await["id"], "slow");
}

#[tokio::test]
async fn an_id_in_flight_is_refused_and_free_again_afterwards() {
    let mut fixture = peer_fixture().await;
    let request = r#"{"jsonrpc":"2.0","id":1,"method":"wait","params":["first"]}"#;
    fixture.send(request).await;
    fixture.hear().await;
    let refused = fixture.ask(request).await;
    assert_eq!(
        (&refused["id"], &refused["error"]["code"]),
        (&Value::Null, &json!(-32600))
    );
    fixture.handler.gate.add_permits(1);
    assert_eq!(fixture.read().await["result"], json!(["first"]));
    fixture.handler.gate.add_permits(1);
    assert_eq!(fixture.ask(request).await["result"], json!(["first"]));
}

#[tokio::test]
async fn more_requests_than_may_be_in_flight_are_refused_at_once() {
    let mut fixture = peer_fixture().await;
    for id in 1..=3 {
        fixture
            .send(&json!({"jsonrpc":"2.0","id":id,"method":"wait"}).to_string())
            .await;
        fixture.hear().await;
    }
    let refused = fixture.ask(r#"{"jsonrpc":"2.0","id":4,"method":"echo"}"#).await;
    assert_eq!(refused["id"], 4);
    assert_eq!(refused["error"]["data"]["code"], "limit_exceeded");
    fixture.handler.gate.add_permits(1);
    fixture.read().await;
    assert_eq!(
        fixture.ask(r#"{"jsonrpc":"2.0","id":5,"method":"echo"}"#).await["result"],
        Value::Null
    );
}

#[tokio::test]
async fn cancel_reaches_the_request_and_no_other() {
    let mut fixture = peer_fixture().await;
    for id in [json!(1), json!("1")] {
        fixture
            .send(&json!({"jsonrpc":"2.0","id":id,"method":"wait"}).to_string())
            .await;
        fixture.hear().await;
    }
    fixture
        .send(r#"{"jsonrpc":"2.0","method":"cancel","params":{"id":99}}"#)
        .await;
    fixture
        .send(r#"{"jsonrpc":"2.0","method":"cancel","params":7}"#)
        .await;
    fixture
        .send(r#"{"jsonrpc":"2.0","method":"cancel","params":{"id":"1"}}"#)
        .await;
    assert_eq!(fixture.hear().await, r#"cancelled "1""#);
    assert_eq!(fixture.read().await["id"], "1");
    assert_eq!(fixture.peer.in_flight(), 1);
}

#[tokio::test]
async fn the_end_of_the_stream_cancels_what_is_in_flight() {
    let mut fixture = peer_fixture().await;
    fixture.send(r#"{"jsonrpc":"2.0","id":1,"method":"wait"}"#).await;
    fixture.hear().await;
    drop((fixture.out, fixture.lines));
    assert_eq!(fixture.heard.recv().await.unwrap(), "cancelled 1");
    assert_eq!(fixture.ended.await.unwrap(), CloseReason::ByPeer);
    assert_eq!((fixture.peer.in_flight(), fixture.peer.pending_calls()), (0, 0));
}

#[tokio::test]
async fn a_line_too_long_ends_the_connection_and_one_that_fits_does_not() {
    let mut fixture = peer_fixture().await;
    let frame =
        |n: usize| json!({"jsonrpc":"2.0","id":1,"method":"echo","params":["x".repeat(n)]}).to_string();
    let bare = frame(0).len();
    assert_eq!(fixture.ask(&frame(LINE - bare)).await["id"], 1);
    fixture.send(&frame(LINE - bare + 1)).await;
    assert_eq!(fixture.lines.next_line().await.unwrap(), None);
    assert_eq!(fixture.ended.await.unwrap(), CloseReason::LineTooLong(LINE));
}

#[tokio::test]
async fn an_answer_too_long_becomes_an_error() {
    let mut fixture = peer_fixture().await;
    let answer = fixture.ask(r#"{"jsonrpc":"2.0","id":1,"method":"big"}"#).await;
    assert_eq!(answer["error"]["data"]["code"], "limit_exceeded");
}

#[tokio::test]
async fn a_panicking_handler_is_an_error_not_silence() {
    let mut fixture = peer_fixture().await;
    let answer = fixture.ask(r#"{"jsonrpc":"2.0","id":1,"method":"panic"}"#).await;
    assert_eq!(answer["error"]["data"]["code"], "internal");
    assert_eq!(
        fixture.ask(r#"{"jsonrpc":"2.0","id":1,"method":"echo"}"#).await["id"],
        1
    );
}

#[tokio::test]
async fn notifications_and_progress_go_both_ways() {
    let mut fixture = peer_fixture().await;
    fixture
        .send(r#"{"jsonrpc":"2.0","method":"note","params":{"a":1}}"#)
        .await;
    assert_eq!(fixture.hear().await, r#"note {"a":1}"#);
    fixture
        .send(r#"{"jsonrpc":"2.0","method":"progress","params":{"id":5,"progress":1}}"#)
        .await;
    assert_eq!(fixture.hear().await, r#"progress {"id":5,"progress":1}"#);
    let report = fixture
        .ask(r#"{"jsonrpc":"2.0","id":"p","method":"progress"}"#)
        .await;
    let params = json!({"id":"p","progress":0.5,"total":1.0,"message":"half"});
    assert_eq!(
        report,
        json!({"jsonrpc":"2.0","method":"progress","params":params})
    );
    assert_eq!(fixture.read().await["id"], "p");
}

#[tokio::test]
async fn a_peer_that_floods_bad_lines_and_reads_no_answer_is_disconnected() {
    let mut fixture = peer_fixture_with(PeerLimits {
        max_refusal_bytes: 100_000,
        ..PeerLimits::default()
    })
    .await;
    let (mut out, ended) = (fixture.out, &mut fixture.ended);
    let flood = async { while out.write_all(b"x\n").await.is_ok() {} };
    tokio::select! {
        closed = ended => assert_eq!(closed.unwrap(), CloseReason::NotReading),
        () = flood => assert_eq!(fixture.peer.wait_closed().await, CloseReason::NotReading),
    }
}

#[tokio::test]
async fn dropping_a_call_sends_one_cancel() {
    let mut fixture = peer_fixture().await;
    let peer = fixture.peer.clone();
    let call = tokio::spawn(async move { peer.call("ask", json!({"q":1})).await });
    let asked = fixture.read().await;
    assert_eq!(
        (&asked["method"], &asked["params"]),
        (&json!("ask"), &json!({"q":1}))
    );
    call.abort();
    let cancel = fixture.read().await;
    assert_eq!(
        cancel,
        json!({"jsonrpc":"2.0","method":"cancel","params":{"id":asked["id"]}})
    );
    assert_eq!(fixture.peer.pending_calls(), 0);
    // A late answer is dropped, and later calls are not disturbed.
    fixture
        .send(&json!({"jsonrpc":"2.0","id":asked["id"],"result":"late"}).to_string())
        .await;
    let peer = fixture.peer.clone();
    let call = tokio::spawn(async move { peer.call("again", Value::Null).await });
    let asked = fixture.read().await;
    assert_eq!(asked["method"], "again");
    fixture
        .send(&json!({"jsonrpc":"2.0","id":asked["id"],"result":"in time"}).to_string())
        .await;
    assert_eq!(call.await.unwrap(), Ok(json!("in time")));
}

#[tokio::test]
async fn timeout_and_cancel_are_errors_of_their_own_and_reach_the_other_side() {
    let mut fixture = peer_fixture().await;
    let expires = CallOptions::default().timeout(std::time::Duration::from_millis(5));
    assert_eq!(
        fixture.peer.call_with("a", Value::Null, expires).await,
        Err(CallError::Timeout)
    );
    let token = tokio_util::sync::CancellationToken::new();
    token.cancel();
    let cancelled = CallOptions::default().cancel(token);
    assert_eq!(
        fixture.peer.call_with("b", Value::Null, cancelled).await,
        Err(CallError::Cancelled)
    );
    let methods = [
        fixture.read().await,
        fixture.read().await,
        fixture.read().await,
        fixture.read().await,
    ];
    assert_eq!(
        methods.map(|m| m["method"].clone()),
        ["a", "cancel", "b", "cancel"].map(Value::from)
    );
}

#[tokio::test]
async fn answers_keep_result_error_and_progress_apart() {
    let mut fixture = peer_fixture().await;
    let (tx, mut reports) = mpsc::unbounded_channel();
    let peer = fixture.peer.clone();
    let call = tokio::spawn(async move {
        let options = CallOptions::default().on_progress(move |p| tx.send(p).unwrap());
        peer.call_with("ask", Value::Null, options).await
    });
    let id = fixture.read().await["id"].clone();
    fixture
        .send(
            &json!({"jsonrpc":"2.0","method":"progress","params":{"id":id,"progress":3,"message":"m"}})
                .to_string(),
        )
        .await;
    let report = reports.recv().await.unwrap();
    assert_eq!(
        report,
        ProgressReport {
            progress: 3.0,
            total: None,
            message: Some("m".into())
        }
    );
    let error = json!({"code":-32003,"message":"no","data":{"code":"not_allowed"}});
    fixture
        .send(&json!({"jsonrpc":"2.0","id":id,"error":error}).to_string())
        .await;
    let failed = call.await.unwrap().unwrap_err();
    let shared: oubliette_protocol::Error = failed.into();
    assert_eq!(
        (shared.code.as_str(), shared.message.as_str()),
        ("not_allowed", "no")
    );
}

#[tokio::test]
async fn a_malformed_answer_fails_its_call() {
    let mut fixture = peer_fixture().await;
    let peer = fixture.peer.clone();
    let call = tokio::spawn(async move { peer.call("ask", Value::Null).await });
    let id = fixture.read().await["id"].clone();
    fixture
        .send(&json!({"jsonrpc":"2.0","id":id,"error":"what"}).to_string())
        .await;
    assert!(matches!(call.await.unwrap(), Err(CallError::BadAnswer(_))));
}

#[tokio::test]
async fn calls_fail_at_once_when_the_connection_ends() {
    let mut fixture = peer_fixture().await;
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let peer = fixture.peer.clone();
            tokio::spawn(async move { peer.call("ask", Value::Null).await })
        })
        .collect();
    for _ in 0..50 {
        fixture.read().await;
    }
    drop((fixture.out, fixture.lines));
    for call in calls {
        assert_eq!(call.await.unwrap(), Err(CallError::Closed(CloseReason::ByPeer)));
    }
    assert_eq!(
        fixture.peer.call("ask", Value::Null).await,
        Err(CallError::Closed(CloseReason::ByPeer))
    );
    assert!(fixture.peer.notify("x", Value::Null).await.is_err());
}

#[tokio::test]
async fn closing_writes_what_is_queued() {
    let mut fixture = peer_fixture().await;
    fixture.peer.notify("last", json!({"word":true})).await.unwrap();
    fixture.peer.close();
    assert_eq!(fixture.read().await["method"], "last");
    assert_eq!(fixture.lines.next_line().await.unwrap(), None);
    assert_eq!(fixture.ended.await.unwrap(), CloseReason::ByUs);
}

#[tokio::test]
async fn calls_past_the_limit_and_lines_past_the_limit_are_not_sent() {
    let fixture = peer_fixture_with(PeerLimits {
        max_pending_calls: 0,
        ..PeerLimits::default()
    })
    .await;
    assert_eq!(
        fixture.peer.call("x", Value::Null).await,
        Err(CallError::TooManyCalls(0))
    );
    let fixture = peer_fixture_with(PeerLimits {
        max_line_bytes: 100,
        ..PeerLimits::default()
    })
    .await;
    assert_eq!(
        fixture.peer.call("x", json!(["x".repeat(100)])).await,
        Err(CallError::MessageTooLong(100))
    );
    assert_eq!(fixture.peer.pending_calls(), 0);
}

#[tokio::test]
async fn a_side_that_does_not_read_makes_this_side_wait_not_grow() {
    let (near, far) = tokio::io::duplex(64);
    let (tx, _heard) = mpsc::unbounded_channel();
    let handler = Arc::new(EchoHandler {
        gate: Semaphore::new(0),
        heard: tx,
    });
    let (peer, _) = RpcPeer::spawn(
        far,
        handler,
        PeerLimits {
            max_queue_bytes: 1_000,
            ..PeerLimits::default()
        },
    );
    let flood = async {
        let mut sent = 0;
        // One batch may be on its way and one queue full behind it; then the sender is made to wait.
        while tokio::time::timeout(
            std::time::Duration::from_secs(1),
            peer.notify("n", json!(["x".repeat(100)])),
        )
        .await
        .is_ok()
        {
            sent += 1;
            assert!(sent < 2_000, "nothing holds the sender back");
        }
    };
    flood.await;
    // Once the other side reads, everything flows again.
    let mut lines = BufReader::new(near).lines();
    let reading = tokio::spawn(async move { while lines.next_line().await.unwrap().is_some() {} });
    peer.notify("n", json!(["x".repeat(100)])).await.unwrap();
    reading.abort();
}

#[tokio::test]
async fn answers_that_are_not_read_keep_their_place_in_flight() {
    let (near, far) = tokio::io::duplex(64);
    let (tx, _heard) = mpsc::unbounded_channel();
    let handler = Arc::new(EchoHandler {
        gate: Semaphore::new(0),
        heard: tx,
    });
    let limits = PeerLimits {
        max_queue_bytes: 1_000,
        max_in_flight: 3,
        ..PeerLimits::default()
    };
    let (_peer, _) = RpcPeer::spawn(far, handler, limits);
    let (read, mut out) = tokio::io::split(near);
    for id in 0..100 {
        let line = format!("{}\n", json!({"jsonrpc":"2.0","id":id,"method":"big"}));
        out.write_all(line.as_bytes()).await.unwrap();
    }
    let mut lines = BufReader::new(read).lines();
    assert!(lines.next_line().await.unwrap().unwrap().contains("hello"));
    let (mut served, mut refused) = (0, 0);
    for _ in 0..100 {
        let answer: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        match answer["error"]["data"]["code"].as_str() {
            None => served += 1,
            Some("limit_exceeded") => refused += 1,
            Some(other) => panic!("{other}"),
        }
    }
    // Three in flight, and the few whose answers the writer had already taken.
    assert!((3..10).contains(&served), "{served} served, {refused} refused");
}
