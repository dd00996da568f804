use std::time::Duration;

use async_trait::async_trait;
use oubliette_relay::{Handler, Limits, Peer, RequestContext, RpcError};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader, DuplexStream, Lines},
    sync::mpsc,
};

use super::*;
use crate::patience::Beat;
use crate::{call::Calls, intake::Intake, link::Link, registry::Registry};

const OLD: ProtocolVersion = ProtocolVersion::V_2025_06_18;

/// A lane to a server that is not there, and what the agent reads.
pub(crate) fn lane() -> (Arc<Lane<Calls>>, Lines<BufReader<DuplexStream>>) {
    lane_to("/nowhere/relay.sock".into())
}

fn lane_to(socket: std::path::PathBuf) -> (Arc<Lane<Calls>>, Lines<BufReader<DuplexStream>>) {
    let registry = Arc::new(Registry::default());
    let link = Link::start(socket, None, registry.clone());
    let (near, far) = tokio::io::duplex(1 << 20);
    let lane = Lane::new(
        Arc::new(Calls {
            registry,
            link,
            beat: Beat::default(),
        }),
        Out::start(near),
    );
    lane.open_for(Some(&OLD));
    (lane, BufReader::new(far).lines())
}

fn call(id: Value, name: &str) -> Vec<u8> {
    let params = json!({"name":name,"arguments":{"a":[1, null]}});
    json!({"jsonrpc":"2.0","id":id,"method":"tools/call","params":params})
        .to_string()
        .into_bytes()
}

async fn next(lines: &mut Lines<BufReader<DuplexStream>>) -> Value {
    let line = tokio::time::timeout(Duration::from_secs(10), lines.next_line()).await;
    serde_json::from_str(&line.expect("a line in time").unwrap().expect("a line")).unwrap()
}

#[test]
fn an_ordinary_call_may_go_by_the_lane() {
    let read = |line: &str| {
        let line = line.to_owned();
        let request = Request::read(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
        let arguments = request.arguments.get().to_owned();
        (request.id, request.name.into_owned(), arguments, request.token)
    };
    let number = RequestId::Number;
    let text = |id: &str| RequestId::String(id.into());
    assert_eq!(
        read(r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"x","arguments":{"a": 1}}}"#),
        (number(7), "x".into(), r#"{"a": 1}"#.into(), None)
    );
    assert_eq!(
        read(r#" {"params":{"name":"\u0078"},"method":"tools/call","id":"7","jsonrpc":"2.0"} "#),
        (text("7"), "x".into(), "{}".into(), None)
    );
    let meta = |meta: &str| {
        read(&format!(
            r#"{{"jsonrpc":"2.0","id":-1,"method":"tools/call","params":{{"name":"x","arguments":null,"_meta":{meta}}}}}"#
        ))
        .3
    };
    assert_eq!(meta("null"), None);
    assert_eq!(meta("{}"), None);
    assert_eq!(meta(r#"{"traceparent":"00"}"#), None);
    assert_eq!(meta(r#"{"progressToken":3}"#), Some(ProgressToken(number(3))));
    assert_eq!(meta(r#"{"progressToken":"t"}"#), Some(ProgressToken(text("t"))));
}

#[test]
fn what_is_not_ordinary_may_not() {
    let version = r#"{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}"#;
    for (id, rest) in [
        ("1", r#""method":"tools/list","params":{"name":"x"}"#),
        ("1", r#""method":"tools/call""#),
        ("1", r#""method":"tools/call","params":{}"#),
        ("1", r#""method":"tools/call","params":{"name":1}"#),
        (
            "1",
            r#""method":"tools/call","params":{"name":"x","arguments":[]}"#,
        ),
        ("1", r#""method":"tools/call","params":{"name":"x","task":{}}"#),
        ("1", r#""method":"tools/call","params":{"name":"x"},"extra":1"#),
        ("1", r#""method":"tools/call","params":{"name":"x","name":"y"}"#),
        (
            "1",
            r#""method":"tools/call","params":{"name":"x","_meta":{"progressToken":[]}}"#,
        ),
        (
            "1",
            &format!(r#""method":"tools/call","params":{{"name":"x","_meta":{version}}}"#),
        ),
        ("null", r#""method":"tools/call","params":{"name":"x"}"#),
        ("1.5", r#""method":"tools/call","params":{"name":"x"}"#),
        ("1.0", r#""method":"tools/call","params":{"name":"x"}"#),
        ("-0", r#""method":"tools/call","params":{"name":"x"}"#),
        ("[1]", r#""method":"tools/call","params":{"name":"x"}"#),
        (
            "99999999999999999999",
            r#""method":"tools/call","params":{"name":"x"}"#,
        ),
    ] {
        let line = format!(r#"{{"jsonrpc":"2.0","id":{id},{rest}}}"#);
        assert!(Request::read(line.as_bytes()).is_none(), "{line}");
    }
    for line in [
        "",
        "[]",
        r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"x"}}"#,
        r#"{"jsonrpc":"1.0","id":1,"method":"tools/call","params":{"name":"x"}}"#,
        r#"{"id":1,"method":"tools/call","params":{"name":"x"}}"#,
    ] {
        assert!(Request::read(line.as_bytes()).is_none(), "{line}");
    }
    let bad = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":\"\xff\"}}";
    assert!(Request::read(bad).is_none());
}

#[test]
fn a_cancel_names_its_request_however_it_is_written() {
    let about = |params: &str| {
        cancelled(
            format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}"#).as_bytes(),
        )
    };
    assert_eq!(
        about(r#"{"requestId":1,"reason":"x"}"#),
        Some(RequestId::Number(1))
    );
    assert_eq!(about(r#"{"requestId":1.0}"#), Some(RequestId::Number(1)));
    assert_eq!(about(r#"{"requestId":"1"}"#), Some(RequestId::String("1".into())));
    assert_eq!(about("{}"), None);
    assert_eq!(
        cancelled(br#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"requestId":1}}"#),
        None
    );
}

#[tokio::test]
async fn the_lane_is_open_after_a_handshake_of_an_older_revision_alone() {
    let (lane, mut lines) = lane();
    for version in [None, Some(ProtocolVersion::V_2026_07_28)] {
        lane.open_for(version.as_ref());
        assert_eq!(lane.take(&call(json!(1), "x")), Way::Long);
    }
    lane.open_for(Some(&OLD));
    assert_eq!(lane.take(&call(json!(1), "x")), Way::Lane);
    assert_eq!(lane.take(&call(json!(1), "x")), Way::Long, "the id is in use");
    let answer = next(&mut lines).await;
    assert_eq!(answer["id"], 1);
    assert_eq!(answer["result"]["isError"], true);
    assert_eq!(answer["result"].get("resultType"), None);
    assert_eq!(lane.take(&call(json!(1), "x")), Way::Lane, "it is free again");
    lane.finished().await;
    assert_eq!(next(&mut lines).await["id"], 1);
}

/// `plain` answers with what it is asked, `soon` in a moment; `wait` waits to be given up.
struct Server(mpsc::UnboundedSender<&'static str>);

#[async_trait]
impl Handler for Server {
    async fn request(&self, name: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        if name == "agent_tools" {
            return Ok(json!({"tools":[]}));
        }
        Ok(match params["tool"].as_str() {
            Some("plain") => json!({"content":[{"type":"text","text":params.to_string()}],"isError":false}),
            Some("soon") => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                json!("done")
            }
            Some("wait") => {
                let _ = self.0.send("asked");
                context.cancel.cancelled().await;
                let _ = self.0.send("given up");
                Value::Null
            }
            _ => json!({"content":[]}),
        })
    }
}

async fn connected() -> (
    Arc<Lane<Calls>>,
    Lines<BufReader<DuplexStream>>,
    mpsc::UnboundedReceiver<&'static str>,
    tempfile::TempDir,
) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("relay.sock");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let (heard, hears) = mpsc::unbounded_channel();
    let (lane, lines) = lane_to(socket);
    let (stream, _) = listener.accept().await.unwrap();
    Peer::spawn(stream, Arc::new(Server(heard)), Limits::default());
    let mut learnt = lane.calls.registry.learnt();
    learnt.wait_for(|learnt| *learnt).await.unwrap();
    (lane, lines, hears, dir)
}

#[tokio::test]
async fn a_plain_answer_and_one_that_is_converted_look_alike() {
    let (lane, mut lines, _hears, _dir) = connected().await;
    assert_eq!(lane.take(&call(json!("a"), "plain")), Way::Lane);
    let asked = json!({"tool":"plain","arguments":{"a":[1, null]}}).to_string();
    let content = json!([{"type":"text","text":asked}]);
    assert_eq!(
        next(&mut lines).await,
        json!({"jsonrpc":"2.0","id":"a","result":{"content":content,"isError":false}})
    );
    assert_eq!(lane.take(&call(json!("b"), "bare")), Way::Lane);
    assert_eq!(
        next(&mut lines).await,
        json!({"jsonrpc":"2.0","id":"b","result":{"content":[],"isError":false}})
    );
}

#[tokio::test]
async fn a_cancelled_call_is_given_up_at_the_server_and_never_answered() {
    let (lane, mut lines, mut hears, _dir) = connected().await;
    assert_eq!(lane.take(&call(json!(1), "wait")), Way::Lane);
    assert_eq!(hears.recv().await, Some("asked"));
    let cancel = br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
    // The library hears of it too: the id may be one of its own.
    assert_eq!(lane.take(cancel), Way::Long);
    // The id is free at once, and the first call's end does not end the second.
    assert_eq!(lane.take(&call(json!(1), "plain")), Way::Lane);
    assert_eq!(hears.recv().await, Some("given up"));
    let answer = next(&mut lines).await;
    assert_eq!(answer["id"], 1);
    assert_eq!(answer["result"]["isError"], false);
    lane.finished().await;
    let more = tokio::time::timeout(Duration::from_millis(50), lines.next_line()).await;
    assert!(more.is_err(), "one answer only: {more:?}");
}

#[tokio::test]
async fn many_calls_at_once_are_each_answered_once() {
    let (lane, mut lines, _hears, _dir) = connected().await;
    for id in 0..2_000 {
        assert_eq!(lane.take(&call(json!(id), "plain")), Way::Lane);
    }
    let mut ids = std::collections::BTreeSet::new();
    for _ in 0..2_000 {
        assert!(ids.insert(next(&mut lines).await["id"].as_i64().unwrap()));
    }
    assert_eq!((ids.first(), ids.last()), (Some(&0), Some(&1_999)));
    assert!(lane.open.lock().is_empty());
}

#[tokio::test]
async fn the_agents_end_is_told_when_its_last_calls_have_been_answered() {
    let (lane, mut lines, _hears, _dir) = connected().await;
    let mut sent = call(json!(1), "soon");
    sent.extend_from_slice(b"\nnot a call\n");
    let mut rest = String::new();
    let mut intake = Intake::new(&*sent, lane.clone());
    intake.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "not a call\n");
    assert!(lane.open.lock().is_empty());
    let answer = next(&mut lines).await;
    assert_eq!(answer["result"]["content"][0]["text"], "done");
}
