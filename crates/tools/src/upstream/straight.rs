//! Calls that go straight onto a wire.
//!
//! The MCP client makes the handshake, lists, pings and listens. A call needs nothing of what the client does
//! for a request, and there are many of them: its request is written here, and its answer comes by
//! [`super::traffic`].

use oubliette_protocol::Object;
use rmcp::model::{ClientConfig, ProtocolVersion, RequestMetaObject};
use serde::{Serialize, Serializer, ser::SerializeMap};
use tokio::sync::oneshot;

use super::{
    handshake::Lifecycle,
    traffic::Reply,
    wire::{NotSent, Wire},
};
use crate::call::ProgressSink;

/// What every request says of us, besides where its progress goes.
pub(super) struct Stamp(RequestMetaObject);

impl Stamp {
    /// In the newer lifecycle every request says what `initialize` says once.
    pub(super) fn new(lifecycle: Lifecycle, us: ClientConfig) -> Self {
        let mut meta = RequestMetaObject::new();
        if lifecycle == Lifecycle::Discover {
            meta.set_protocol_version(ProtocolVersion::NO_INITIALIZE);
            meta.set_client_info(us.client_info);
            meta.set_client_capabilities(us.capabilities);
        }
        Self(meta)
    }
}

/// A call that was sent. Dropped before its answer came, it tells the server that nobody waits any more.
pub(super) struct Straight {
    wire: Wire,
    id: i64,
    pub(super) reply: oneshot::Receiver<Reply>,
}

impl Straight {
    /// Sends a call of a tool.
    pub(super) fn send(
        wire: &Wire,
        stamp: &Stamp,
        tool: &str,
        arguments: &Object,
        progress: Option<ProgressSink>,
    ) -> Result<Self, NotSent> {
        let (id, reply) = wire.traffic().open_call(progress);
        let request = Request {
            jsonrpc: "2.0",
            id,
            method: "tools/call",
            params: Params {
                meta: Meta(&stamp.0, id),
                name: tool,
                arguments,
            },
        };
        let sent = serde_json::to_vec(&request)
            .map_err(|error| NotSent::Refused(format!("the call cannot be written: {error}")))
            .and_then(|bytes| wire.post_call(id, bytes));
        if let Err(why) = sent {
            wire.traffic().give_up(id);
            return Err(why);
        }
        Ok(Self {
            wire: wire.clone(),
            id,
            reply,
        })
    }
}

impl Drop for Straight {
    fn drop(&mut self) {
        if !self.wire.traffic().give_up(self.id) {
            return;
        }
        let cancelled = serde_json::json!({
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": self.id, "reason": "nobody waits for it any more"},
        });
        // A connection that is gone needs no word.
        let _ = self.wire.post(cancelled.to_string().into_bytes());
    }
}

#[derive(Serialize)]
struct Request<'a> {
    jsonrpc: &'static str,
    id: i64,
    method: &'static str,
    params: Params<'a>,
}

#[derive(Serialize)]
struct Params<'a> {
    #[serde(rename = "_meta")]
    meta: Meta<'a>,
    name: &'a str,
    arguments: &'a Object,
}

struct Meta<'a>(&'a RequestMetaObject, i64);

impl Serialize for Meta<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in self.0.iter() {
            map.serialize_entry(key, value)?;
        }
        map.serialize_entry("progressToken", &self.1)?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use rmcp::ClientHandler;
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, BufReader, DuplexStream};

    use super::*;
    use crate::upstream::{
        handshake::Us,
        lines::{LineReader, LineWriter},
        traffic::Traffic,
    };

    /// A wire, and what the server has of it.
    fn wire() -> (Wire, BufReader<DuplexStream>) {
        let (ours, theirs) = tokio::io::duplex(1024 * 1024);
        let (read, write) = tokio::io::split(ours);
        let traffic = Traffic::new("t".parse().unwrap(), Arc::default());
        let wire = Wire::new(LineReader::new(read), LineWriter(write), traffic);
        (wire, BufReader::new(theirs))
    }

    async fn next(server: &mut BufReader<DuplexStream>) -> Value {
        let mut line = String::new();
        server.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn send(wire: &Wire, lifecycle: Lifecycle) -> Straight {
        let arguments = Object::from_iter([("text".to_owned(), json!("hi"))]);
        Straight::send(
            wire,
            &Stamp::new(lifecycle, Us.get_info()),
            "echo",
            &arguments,
            None,
        )
        .unwrap()
    }

    #[tokio::test]
    async fn a_call_says_of_us_what_its_lifecycle_wants() {
        let (wire, mut server) = wire();
        let _older = send(&wire, Lifecycle::Initialize);
        let request = next(&mut server).await;
        let id = request["id"].clone();
        let params = json!({"_meta": {"progressToken": id}, "name": "echo", "arguments": {"text": "hi"}});
        assert_eq!(
            request,
            json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
        );
        let _newer = send(&wire, Lifecycle::Discover);
        let meta = next(&mut server).await["params"]["_meta"].clone();
        assert_eq!(
            meta["io.modelcontextprotocol/protocolVersion"],
            json!("2026-07-28")
        );
        assert_eq!(
            meta["io.modelcontextprotocol/clientInfo"]["name"],
            json!("oubliette")
        );
        assert_eq!(meta["io.modelcontextprotocol/clientCapabilities"], json!({}));
    }

    #[tokio::test]
    async fn an_answer_is_its_calls_whatever_the_order() {
        let (wire, _server) = wire();
        let (mut one, mut two) = (
            send(&wire, Lifecycle::Initialize),
            send(&wire, Lifecycle::Initialize),
        );
        let say = |id: i64, rest: &str| {
            let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{rest}}}");
            assert!(wire.traffic().incoming(&Bytes::from(text)).is_none());
        };
        say(two.id, r#""error":{"code":-1,"message":"no"}"#);
        say(one.id, r#""result":{"content":[]}"#);
        assert!(matches!((&mut two.reply).await, Ok(Reply::Refused(why)) if why == "no"));
        assert!(matches!((&mut one.reply).await, Ok(Reply::Result(text)) if text == r#"{"content":[]}"#));
    }

    #[tokio::test]
    async fn a_call_given_up_is_cancelled_and_one_that_is_answered_is_not() {
        let (wire, mut server) = wire();
        let answered = send(&wire, Lifecycle::Initialize);
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":{{}}}}", answered.id);
        wire.traffic().incoming(&Bytes::from(text));
        drop(answered);
        let given_up = send(&wire, Lifecycle::Initialize);
        let id = given_up.id;
        drop(given_up);
        next(&mut server).await;
        assert_eq!(next(&mut server).await["method"], json!("tools/call"));
        let last = next(&mut server).await;
        assert_eq!(last["method"], json!("notifications/cancelled"));
        assert_eq!(last["params"]["requestId"], json!(id));
        assert!(!wire.traffic().give_up(id), "nothing of it is left");
    }

    #[tokio::test]
    async fn a_closed_wire_refuses_calls_and_tells_those_that_were_not_sent() {
        let (wire, server) = wire();
        drop(server);
        let mut lost = send(&wire, Lifecycle::Initialize);
        assert!(matches!(
            (&mut lost.reply).await,
            Ok(Reply::NotSent(NotSent::Broken(_)))
        ));
        wire.close("over").await;
        let arguments = Object::new();
        let stamp = Stamp::new(Lifecycle::Initialize, Us.get_info());
        let refused = Straight::send(&wire, &stamp, "echo", &arguments, None);
        assert!(matches!(refused, Err(NotSent::Refused(why)) if why.contains("closed")));
    }
}
