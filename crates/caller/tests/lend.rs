//! The library against a stub of the server's REST and SSE interface.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use oubliette_caller::{Error, Message, Oubliette};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};

/// The stub server's side of one session.
struct StubSession {
    log: Mutex<Vec<Value>>,
    streams: Mutex<Vec<mpsc::UnboundedSender<Result<Bytes, Infallible>>>>,
    calls: mpsc::UnboundedSender<(String, Value)>,
    opened: mpsc::UnboundedSender<(HashMap<String, String>, Option<String>)>,
    /// How many further answers are refused with 503.
    failures_left: AtomicUsize,
}

struct CallerFixture {
    stub: Arc<StubSession>,
    calls: mpsc::UnboundedReceiver<(String, Value)>,
    opened: mpsc::UnboundedReceiver<(HashMap<String, String>, Option<String>)>,
    client: Oubliette,
}

const SESSION: &str = "gogol_01J00000000000000000000000";

async fn tool(
    State(stub): State<Arc<StubSession>>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let refused = |status: StatusCode, code: &str| {
        (status, Json(json!({"error":{"code":code,"message":code}}))).into_response()
    };
    if headers
        .get("authorization")
        .is_none_or(|v| v != "Bearer oub_good")
    {
        return refused(StatusCode::UNAUTHORIZED, "unauthenticated");
    }
    let arguments: Value = serde_json::from_slice(&body).unwrap();
    if name == "caller_tool_response"
        && stub
            .failures_left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
            .is_ok()
    {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "unavailable");
    }
    let result = match name.as_str() {
        "session_message" => json!({"session_id":SESSION,"turn":1,"status":"running"}),
        "session_events" => {
            let since = arguments["since_index"].as_i64().unwrap();
            let log = stub.log.lock().unwrap();
            let page: Vec<_> = log
                .iter()
                .filter(|e| e["index"].as_i64().unwrap() > since)
                .take(2)
                .cloned()
                .collect();
            json!({"events":page,"last_index":0,"status":"idle"})
        }
        _ => json!({"resolved":true}),
    };
    stub.calls.send((name, arguments)).unwrap();
    Json(result).into_response()
}

async fn events(
    State(stub): State<Arc<StubSession>>,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let since: i64 = query["since_index"].parse().unwrap();
    let (tx, rx) = mpsc::unbounded_channel();
    let _ = tx.send(Ok(Bytes::from(": open\n\n")));
    {
        let log = stub.log.lock().unwrap();
        for event in log.iter().filter(|e| e["index"].as_i64().unwrap() > since) {
            let _ = tx.send(Ok(sse(event)));
        }
        stub.streams.lock().unwrap().push(tx);
    }
    let last = headers
        .get("last-event-id")
        .map(|v| v.to_str().unwrap().to_owned());
    stub.opened.send((query, last)).unwrap();
    let stream = futures::stream::unfold(rx, |mut rx| async move { rx.recv().await.map(|item| (item, rx)) });
    ([("content-type", "text/event-stream")], Body::from_stream(stream)).into_response()
}

fn sse(event: &Value) -> Bytes {
    Bytes::from(format!(
        "id: {}\nevent: {}\ndata: {event}\n\n",
        event["index"],
        event["type"].as_str().unwrap()
    ))
}

impl CallerFixture {
    async fn start() -> Self {
        let (calls_tx, calls) = mpsc::unbounded_channel();
        let (opened_tx, opened) = mpsc::unbounded_channel();
        let stub = Arc::new(StubSession {
            log: Mutex::default(),
            streams: Mutex::default(),
            calls: calls_tx,
            opened: opened_tx,
            failures_left: AtomicUsize::new(0),
        });
        let app = Router::new()
            .route("/api/tools/{name}", post(tool))
            .route("/api/sessions/{id}/events", get(events))
            .with_state(stub.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let client = Oubliette::connect(&address, "oub_good").unwrap();
        Self {
            stub,
            calls,
            opened,
            client,
        }
    }

    fn emit(&self, mut event: Value) -> i64 {
        let mut log = self.stub.log.lock().unwrap();
        let index = i64::try_from(log.len()).unwrap();
        event["index"] = index.into();
        event["session_id"] = SESSION.into();
        log.push(event.clone());
        self.stub
            .streams
            .lock()
            .unwrap()
            .retain(|stream| stream.send(Ok(sse(&event))).is_ok());
        index
    }

    /// Sends an event of the log again.
    fn repeat(&self, index: usize) {
        let event = self.stub.log.lock().unwrap()[index].clone();
        self.stub
            .streams
            .lock()
            .unwrap()
            .iter()
            .for_each(|stream| drop(stream.send(Ok(sse(&event)))));
    }

    fn request(&self, id: &str, arguments: Value) {
        self.emit(
            json!({"type":"caller_tool_request","request_id":id,"caller_id":"myapp","tool":"double",
            "arguments":arguments}),
        );
    }

    fn close_streams(&self) {
        self.stub.streams.lock().unwrap().clear();
    }

    async fn expect_call(&mut self, name: &str) -> Value {
        let (called, arguments) = self.calls.recv().await.unwrap();
        assert_eq!(called, name);
        arguments
    }

    async fn expect_answer(&mut self) -> (String, Value) {
        let answer = self.expect_call("caller_tool_response").await;
        assert_eq!(answer["session_id"], SESSION);
        let outcome = if answer.get("error").is_some() {
            "error"
        } else {
            "result"
        };
        (
            answer["request_id"].as_str().unwrap().to_owned(),
            json!({ outcome: answer[outcome] }),
        )
    }
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Number {
    n: i64,
}

fn lend_double(client: &Oubliette) -> oubliette_caller::Lend {
    client
        .lend("myapp")
        .tool("double", "Doubles", async |number: Number| match number.n {
            13 => Err("unlucky".to_owned()),
            14 => panic!("on purpose"),
            n => Ok(n * 2),
        })
}

#[tokio::test]
async fn a_function_is_declared_called_and_answered() {
    let mut fixture = CallerFixture::start().await;
    let session = lend_double(&fixture.client).start("Double one.").await.unwrap();
    let message = fixture.expect_call("session_message").await;
    assert_eq!(message["message"], "Double one.");
    assert_eq!(message["context"]["caller_id"], "myapp");
    assert_eq!(message["context"]["caller_tools"][0]["name"], "double");
    assert_eq!(
        message["context"]["caller_tools"][0]["inputSchema"]["required"],
        json!(["n"])
    );
    let (query, _) = fixture.opened.recv().await.unwrap();
    assert_eq!(query["caller_id"], "myapp");
    fixture.request("r1", json!({"n":1}));
    assert_eq!(fixture.expect_answer().await, ("r1".into(), json!({"result":2})));
    fixture.emit(json!({"type":"turn_completed","turn":1,"stop_reason":"end_turn","text":"two"}));
    assert_eq!(session.turn(1).await.unwrap().text, "two");
}

#[tokio::test]
async fn errors_panics_and_wrong_arguments_are_the_tools_errors() {
    let mut fixture = CallerFixture::start().await;
    let _session = lend_double(&fixture.client).start("x").await.unwrap();
    fixture.expect_call("session_message").await;
    for (arguments, error) in [
        (json!({"n":13}), "unlucky"),
        (json!({"n":14}), "the tool failed"),
        (
            json!({"n":"x"}),
            "wrong arguments: invalid type: string \"x\", expected i64",
        ),
    ] {
        let id = arguments.to_string();
        fixture.request(&id, arguments);
        assert_eq!(fixture.expect_answer().await, (id, json!({ "error": error })));
    }
}

#[tokio::test]
async fn requests_of_other_callers_are_ignored_and_unknown_tools_refused() {
    let mut fixture = CallerFixture::start().await;
    let _session = lend_double(&fixture.client).start("x").await.unwrap();
    fixture.expect_call("session_message").await;
    fixture.emit(
        json!({"type":"caller_tool_request","request_id":"o","caller_id":"other","tool":"double",
        "arguments":{"n":1}}),
    );
    fixture.emit(
        json!({"type":"caller_tool_request","request_id":"u","caller_id":"myapp","tool":"gone",
        "arguments":{}}),
    );
    let (id, outcome) = fixture.expect_answer().await;
    assert_eq!(id, "u");
    assert!(outcome["error"].as_str().unwrap().contains("gone"));
}

#[tokio::test]
async fn a_lost_stream_is_resumed_and_nothing_runs_twice() {
    let mut fixture = CallerFixture::start().await;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let session = fixture
        .client
        .lend("myapp")
        .tool("double", "Doubles", move |number: Number| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<_, String>(number.n * 2) }
        })
        .start("x")
        .await
        .unwrap();
    fixture.expect_call("session_message").await;
    fixture.opened.recv().await.unwrap();
    fixture.request("r1", json!({"n":1}));
    fixture.expect_answer().await;
    fixture.close_streams();
    let (query, last) = fixture.opened.recv().await.unwrap();
    assert_eq!((query["since_index"].as_str(), last.as_deref()), ("0", Some("0")));
    fixture.repeat(0);
    fixture.request("r2", json!({"n":2}));
    assert_eq!(fixture.expect_answer().await, ("r2".into(), json!({"result":4})));
    fixture.close_streams();
    // Requested while no stream was open: delivered on the next one.
    fixture.request("r3", json!({"n":3}));
    assert_eq!(fixture.expect_answer().await.0, "r3");
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    drop(session);
}

#[tokio::test]
async fn functions_run_concurrently_and_answer_in_order_of_completion() {
    let mut fixture = CallerFixture::start().await;
    let gate = Arc::new(Semaphore::new(0));
    let inside = gate.clone();
    let _session = fixture
        .client
        .lend("myapp")
        .tool("double", "Doubles", move |number: Number| {
            let gate = inside.clone();
            async move {
                if number.n == 0 {
                    gate.acquire().await.unwrap().forget();
                }
                Ok::<_, String>(number.n * 2)
            }
        })
        .start("x")
        .await
        .unwrap();
    fixture.expect_call("session_message").await;
    fixture.request("slow", json!({"n":0}));
    for n in 1..=50 {
        fixture.request(&format!("fast{n}"), json!({"n":n}));
    }
    for _ in 0..50 {
        assert!(fixture.expect_answer().await.0.starts_with("fast"));
    }
    gate.add_permits(1);
    assert_eq!(fixture.expect_answer().await.0, "slow");
}

#[tokio::test]
async fn an_answer_is_sent_again_until_the_server_accepts_it() {
    let mut fixture = CallerFixture::start().await;
    fixture.stub.failures_left.store(2, Ordering::SeqCst);
    let _session = lend_double(&fixture.client).start("x").await.unwrap();
    fixture.expect_call("session_message").await;
    fixture.request("r1", json!({"n":1}));
    assert_eq!(fixture.expect_answer().await, ("r1".into(), json!({"result":2})));
}

#[tokio::test]
async fn a_cancelled_request_stops_its_function() {
    struct Stopped(mpsc::UnboundedSender<()>);
    impl Drop for Stopped {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let mut fixture = CallerFixture::start().await;
    let (tx, mut stopped) = mpsc::unbounded_channel();
    let (started_tx, mut started) = mpsc::unbounded_channel();
    let _session = fixture
        .client
        .lend("myapp")
        .tool("double", "Never ends", move |_: Number| {
            let (guard, started) = (Stopped(tx.clone()), started_tx.clone());
            async move {
                started.send(()).unwrap();
                let _guard = guard;
                std::future::pending::<Result<(), String>>().await
            }
        })
        .start("x")
        .await
        .unwrap();
    fixture.expect_call("session_message").await;
    fixture.request("r1", json!({"n":1}));
    started.recv().await.unwrap();
    fixture.emit(json!({"type":"caller_tool_done","request_id":"r1","outcome":"cancelled"}));
    stopped.recv().await.unwrap();
}

#[tokio::test]
async fn joining_a_session_runs_only_unanswered_requests() {
    let mut fixture = CallerFixture::start().await;
    fixture.request("old", json!({"n":1}));
    fixture.emit(json!({"type":"caller_tool_done","request_id":"old","outcome":"answered"}));
    fixture.emit(json!({"type":"turn_completed","turn":1,"stop_reason":"end_turn","text":"old"}));
    fixture.request("open", json!({"n":2}));
    let _session = lend_double(&fixture.client)
        .start(Message::new("again").session(SESSION).agent("a"))
        .await
        .unwrap();
    for _ in 0..3 {
        fixture.expect_call("session_events").await;
    }
    let message = fixture.expect_call("session_message").await;
    assert_eq!(
        (&message["session_id"], &message["agent"]),
        (&json!(SESSION), &json!("a"))
    );
    assert_eq!(
        fixture.expect_answer().await,
        ("open".into(), json!({"result":4}))
    );
    fixture.request("new", json!({"n":3}));
    assert_eq!(fixture.expect_answer().await, ("new".into(), json!({"result":6})));
}

#[tokio::test]
async fn a_failed_turn_and_an_ended_session_are_errors() {
    let mut fixture = CallerFixture::start().await;
    let (tx, mut events) = mpsc::unbounded_channel();
    let lend = lend_double(&fixture.client).on_event(move |event| tx.send(event.kind.clone()).unwrap());
    let mut session = lend.start("x").await.unwrap();
    fixture.expect_call("session_message").await;
    fixture.emit(json!({"type":"status","status":"running"}));
    fixture.emit(json!({"type":"error","code":"unavailable","message":"no model"}));
    fixture.emit(json!({"type":"status","status":"idle"}));
    let failed = session.turn(1).await.unwrap_err();
    assert!(
        matches!(&failed, Error::Refused { code, .. } if code == "unavailable"),
        "{failed}"
    );
    assert_eq!(session.message("go on").await.unwrap(), 1);
    fixture.emit(json!({"type":"status","status":"ended","reason":"done"}));
    assert_eq!(session.ended().await.to_string(), "the session has ended: done");
    // The failure is of an earlier turn.
    assert!(matches!(session.turn(9).await, Err(Error::Ended(_))));
    let mut heard = Vec::new();
    while let Ok(kind) = events.try_recv() {
        heard.push(kind);
    }
    assert_eq!(heard, ["status", "error", "status", "status"]);
}

#[tokio::test]
async fn an_invalid_token_or_address_is_an_error() {
    let fixture = CallerFixture::start().await;
    drop(fixture);
    assert!(matches!(
        Oubliette::connect("localhost:1", "t"),
        Err(Error::Invalid(_))
    ));
    assert!(matches!(
        Oubliette::connect("http://localhost", "a\nb"),
        Err(Error::Invalid(_))
    ));
    let nobody = Oubliette::connect("http://127.0.0.1:9", "t").unwrap();
    assert!(matches!(
        nobody.lend("a").start("x").await,
        Err(Error::Unreachable(_))
    ));
}

#[tokio::test]
async fn a_refused_token_gives_the_servers_code() {
    let mut fixture = CallerFixture::start().await;
    // Same server, other token.
    let session = lend_double(&fixture.client).start("x").await.unwrap();
    fixture.expect_call("session_message").await;
    drop(session);
    let debug = format!("{:?}", fixture.client);
    assert!(!debug.contains("oub_good"), "{debug}");
    let address = debug.split('"').nth(1).unwrap().to_owned();
    let stranger = Oubliette::connect(&address, "oub_bad").unwrap();
    let refused = stranger.lend("a").start("x").await.unwrap_err();
    assert!(matches!(refused, Error::Refused { code, .. } if code == "unauthenticated"));
}
