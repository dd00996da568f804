use std::time::Duration;

use async_trait::async_trait;
use oubliette_protocol::tool::ToolSource;
use oubliette_relay::{CallOptions, PeerHandler, PeerLimits, RequestContext, RpcError, RpcPeer};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader, DuplexStream, Lines},
    net::UnixStream,
    sync::mpsc,
};

use super::*;
use crate::{line_filter::LineFilter, outcome::call_failed};

const OLD: ProtocolVersion = ProtocolVersion::V_2025_06_18;

/// Calls over a relay connection.
pub(crate) struct PeerCalls {
    peer: RpcPeer,
    heartbeat: Heartbeat,
}

impl CallBackend for PeerCalls {
    const MAX_OPEN_CALLS: usize = 2_000;

    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        cancel: CancellationToken,
        _: Option<ProgressCallback>,
    ) -> Option<impl Future<Output = CallAnswer> + Send + 'static + use<>> {
        #[derive(Serialize)]
        struct TestParams<'a> {
            tool: &'a str,
            arguments: &'a RawValue,
        }
        let params = TestParams {
            tool: name,
            arguments,
        };
        let options = CallOptions::default().cancel(cancel);
        let asked = self.peer.prepare_call("agent_call_tool", &params, options);
        Some(async move {
            let answer = match asked {
                Ok(asked) => asked.send_and_wait().await,
                Err(why) => Err(why),
            };
            match answer {
                Ok(raw) => CallAnswer::Received(ToolSource::Catalog, raw),
                Err(why) => CallAnswer::Failed(call_failed(why)),
            }
        })
    }

    fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }
}

/// A handler that answers nothing.
struct SilentHandler;

impl PeerHandler for SilentHandler {}

type TestFastPath = Arc<FastPath<PeerCalls>>;
type AgentLines = Lines<BufReader<DuplexStream>>;

fn fast_path_over(stream: UnixStream) -> (TestFastPath, AgentLines) {
    let (peer, _) = RpcPeer::spawn(stream, Arc::new(SilentHandler), PeerLimits::default());
    let (near, far) = tokio::io::duplex(1 << 20);
    let backend = PeerCalls {
        peer,
        heartbeat: Heartbeat::default(),
    };
    let fast_path = FastPath::new(
        backend,
        AgentOutput::start(near, 64 * 1024 * 1024, oubliette_protocol::ByteBudget::default()),
    );
    fast_path.enable_for(Some(&OLD));
    (fast_path, BufReader::new(far).lines())
}

/// A fast path to a server that is not there, and what the agent reads.
pub(crate) fn unconnected_fast_path() -> (TestFastPath, AgentLines) {
    fast_path_over(UnixStream::pair().unwrap().0)
}

fn call(id: Value, name: &str) -> Vec<u8> {
    let params = json!({"name":name,"arguments":{"a":[1, null]}});
    json!({"jsonrpc":"2.0","id":id,"method":"tools/call","params":params})
        .to_string()
        .into_bytes()
}

async fn next(lines: &mut AgentLines) -> Value {
    let line = tokio::time::timeout(Duration::from_secs(10), lines.next_line()).await;
    serde_json::from_str(&line.expect("a line in time").unwrap().expect("a line")).unwrap()
}

#[test]
fn ordinary_calls_are_parsed() {
    let read = |line: &str| {
        let line = line.to_owned();
        let request = CallRequest::parse(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
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
fn lines_that_are_not_ordinary_calls_are_left_to_the_library() {
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
        assert!(CallRequest::parse(line.as_bytes()).is_none(), "{line}");
    }
    for line in [
        "",
        "[]",
        r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"x"}}"#,
        r#"{"jsonrpc":"1.0","id":1,"method":"tools/call","params":{"name":"x"}}"#,
        r#"{"id":1,"method":"tools/call","params":{"name":"x"}}"#,
    ] {
        assert!(CallRequest::parse(line.as_bytes()).is_none(), "{line}");
    }
    let bad = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{\"name\":\"\xff\"}}";
    assert!(CallRequest::parse(bad).is_none());
}

#[test]
fn a_cancel_names_its_request_however_it_is_written() {
    let about = |params: &str| {
        cancelled_request(
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
        cancelled_request(br#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"requestId":1}}"#),
        None
    );
}

#[tokio::test]
async fn only_a_handshake_of_an_older_revision_enables_the_fast_path() {
    let (fast_path, mut lines) = unconnected_fast_path();
    for version in [None, Some(ProtocolVersion::V_2026_07_28)] {
        fast_path.enable_for(version.as_ref());
        assert_eq!(fast_path.take(&call(json!(1), "x")), Dispatch::ViaLibrary);
    }
    fast_path.enable_for(Some(&OLD));
    assert_eq!(fast_path.take(&call(json!(1), "x")), Dispatch::FastPath);
    assert_eq!(
        fast_path.take(&call(json!(1), "x")),
        Dispatch::ViaLibrary,
        "the id is in use"
    );
    let answer = next(&mut lines).await;
    assert_eq!(answer["id"], 1);
    assert_eq!(answer["result"]["isError"], true);
    assert_eq!(answer["result"].get("resultType"), None);
    assert_eq!(
        fast_path.take(&call(json!(1), "x")),
        Dispatch::FastPath,
        "it is free again"
    );
    fast_path.finished().await;
    assert_eq!(next(&mut lines).await["id"], 1);
}

/// `plain` answers with what it is asked, `soon` in a moment; `wait` waits to be cancelled.
struct ScriptedServer(mpsc::UnboundedSender<&'static str>);

#[async_trait]
impl PeerHandler for ScriptedServer {
    async fn request(&self, _: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        Ok(match params["tool"].as_str() {
            Some("plain") => json!({"content":[{"type":"text","text":params.to_string()}],"isError":false}),
            Some("soon") => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                json!("done")
            }
            Some("wait") => {
                let _ = self.0.send("asked");
                context.cancel.cancelled().await;
                let _ = self.0.send("cancelled");
                Value::Null
            }
            _ => json!({"content":[]}),
        })
    }
}

fn connected() -> (TestFastPath, AgentLines, mpsc::UnboundedReceiver<&'static str>) {
    let (near, far) = UnixStream::pair().unwrap();
    let (heard, hears) = mpsc::unbounded_channel();
    RpcPeer::spawn(far, Arc::new(ScriptedServer(heard)), PeerLimits::default());
    let (fast_path, lines) = fast_path_over(near);
    (fast_path, lines, hears)
}

#[tokio::test]
async fn forwarded_and_converted_answers_look_alike() {
    let (fast_path, mut lines, _hears) = connected();
    assert_eq!(fast_path.take(&call(json!("a"), "plain")), Dispatch::FastPath);
    let asked = json!({"tool":"plain","arguments":{"a":[1, null]}}).to_string();
    let content = json!([{"type":"text","text":asked}]);
    assert_eq!(
        next(&mut lines).await,
        json!({"jsonrpc":"2.0","id":"a","result":{"content":content,"isError":false}})
    );
    assert_eq!(fast_path.take(&call(json!("b"), "bare")), Dispatch::FastPath);
    assert_eq!(
        next(&mut lines).await,
        json!({"jsonrpc":"2.0","id":"b","result":{"content":[],"isError":false}})
    );
}

#[tokio::test]
async fn a_cancelled_call_is_cancelled_at_the_server_and_never_answered() {
    let (fast_path, mut lines, mut hears) = connected();
    assert_eq!(fast_path.take(&call(json!(1), "wait")), Dispatch::FastPath);
    assert_eq!(hears.recv().await, Some("asked"));
    let cancel = br#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
    // The library hears of it too: the id may be one of its own.
    assert_eq!(fast_path.take(cancel), Dispatch::ViaLibrary);
    // The id is free at once, and the first call's end does not end the second.
    assert_eq!(fast_path.take(&call(json!(1), "plain")), Dispatch::FastPath);
    assert_eq!(hears.recv().await, Some("cancelled"));
    let answer = next(&mut lines).await;
    assert_eq!(answer["id"], 1);
    assert_eq!(answer["result"]["isError"], false);
    fast_path.finished().await;
    let more = tokio::time::timeout(Duration::from_millis(50), lines.next_line()).await;
    assert!(more.is_err(), "one answer only: {more:?}");
}

#[tokio::test]
async fn many_calls_at_once_are_each_answered_once() {
    let (fast_path, mut lines, _hears) = connected();
    for id in 0..2_000 {
        assert_eq!(fast_path.take(&call(json!(id), "plain")), Dispatch::FastPath);
    }
    let mut ids = std::collections::BTreeSet::new();
    for _ in 0..2_000 {
        assert!(ids.insert(next(&mut lines).await["id"].as_i64().unwrap()));
    }
    assert_eq!((ids.first(), ids.last()), (Some(&0), Some(&1_999)));
    assert!(fast_path.open.lock().is_empty());
}

#[tokio::test]
async fn a_call_too_many_and_an_id_too_long_go_via_the_library() {
    let (fast_path, _lines, _hears) = connected();
    let long = "x".repeat(MAX_ID_BYTES);
    assert_eq!(fast_path.take(&call(json!(long), "wait")), Dispatch::ViaLibrary);
    for id in 0..PeerCalls::MAX_OPEN_CALLS {
        assert_eq!(fast_path.take(&call(json!(id), "wait")), Dispatch::FastPath);
    }
    assert_eq!(fast_path.take(&call(json!(-1), "wait")), Dispatch::ViaLibrary);
    fast_path.cancel_all();
    assert_eq!(fast_path.take(&call(json!(-1), "wait")), Dispatch::FastPath);
}

#[tokio::test]
async fn the_filter_ends_when_the_last_calls_have_been_answered() {
    let (fast_path, mut lines, _hears) = connected();
    let mut sent = call(json!(1), "soon");
    sent.extend_from_slice(b"\nnot a call\n");
    let mut rest = String::new();
    let mut filter = LineFilter::new(&*sent, fast_path.clone());
    filter.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "not a call\n");
    assert!(fast_path.open.lock().is_empty());
    let answer = next(&mut lines).await;
    assert_eq!(answer["result"]["content"][0]["text"], "done");
}
