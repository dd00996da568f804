//! Tool calls written to a wire without the MCP library.
//!
//! The library makes the handshake, lists tools, pings and subscribes. Calls are the hot path and need nothing
//! the library does for a request: the request is serialised here, and its response is routed back by
//! [`super::traffic`].

use oubliette_protocol::{JsonObject, relay::ProgressCallback};
use rmcp::model::{ClientConfig, ProtocolVersion, RequestMetaObject};
use serde::{Serialize, Serializer, ser::SerializeMap};
use tokio::sync::oneshot;

use super::{
    handshake::McpLifecycle,
    traffic::CallReply,
    wire::{SendFailure, UpstreamWire},
};

/// The `_meta` fields every request carries, except its progress token.
pub(super) struct RequestMetadata(RequestMetaObject);

impl RequestMetadata {
    /// In the `server/discover` lifecycle every request carries the client information that `initialize` sends
    /// once; in the older one there is none.
    pub(super) fn new(lifecycle: McpLifecycle, us: ClientConfig) -> Self {
        let mut meta = RequestMetaObject::new();
        if lifecycle == McpLifecycle::Discover {
            meta.set_protocol_version(ProtocolVersion::NO_INITIALIZE);
            meta.set_client_info(us.client_info);
            meta.set_client_capabilities(us.capabilities);
        }
        Self(meta)
    }
}

/// A call that was sent. Dropping it before its response sends `notifications/cancelled`.
pub(super) struct DirectCall {
    wire: UpstreamWire,
    id: i64,
    pub(super) reply: oneshot::Receiver<CallReply>,
}

impl DirectCall {
    /// Queues the request of a tool call. The request id is also its progress token.
    pub(super) fn send(
        wire: &UpstreamWire,
        metadata: &RequestMetadata,
        tool: &str,
        arguments: &JsonObject,
        progress: Option<ProgressCallback>,
    ) -> Result<Self, SendFailure> {
        let (id, reply) = wire.traffic().register_call(progress);
        let request = DirectCallRequest {
            jsonrpc: "2.0",
            id,
            method: "tools/call",
            params: CallRequestParams {
                meta: CallRequestMeta(&metadata.0, id),
                name: tool,
                arguments,
            },
        };
        let sent = serde_json::to_vec(&request)
            .map_err(|error| SendFailure::NotWritten(format!("the call cannot be written: {error}")))
            .and_then(|bytes| wire.enqueue_call(id, bytes));
        if let Err(why) = sent {
            wire.traffic().forget_call(id);
            return Err(why);
        }
        Ok(Self {
            wire: wire.clone(),
            id,
            reply,
        })
    }
}

impl Drop for DirectCall {
    fn drop(&mut self) {
        if !self.wire.traffic().forget_call(self.id) {
            return;
        }
        let cancelled = serde_json::json!({
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": self.id, "reason": "nobody waits for it any more"},
        });
        // On a closed connection there is no one to notify.
        let _ = self.wire.enqueue(cancelled.to_string().into_bytes());
    }
}

#[derive(Serialize)]
struct DirectCallRequest<'a> {
    jsonrpc: &'static str,
    id: i64,
    method: &'static str,
    params: CallRequestParams<'a>,
}

#[derive(Serialize)]
struct CallRequestParams<'a> {
    #[serde(rename = "_meta")]
    meta: CallRequestMeta<'a>,
    name: &'a str,
    arguments: &'a JsonObject,
}

struct CallRequestMeta<'a>(&'a RequestMetaObject, i64);

impl Serialize for CallRequestMeta<'_> {
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
    use oubliette_protocol::ByteBudget;
    use rmcp::ClientHandler;
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, BufReader, DuplexStream};

    use super::*;
    use crate::upstream::{
        handshake::OublietteClientHandler,
        lines::{LineReader, LineWriter},
        traffic::TrafficFilter,
    };

    /// A wire and the server's end of it.
    fn wire() -> (UpstreamWire, BufReader<DuplexStream>) {
        let (ours, theirs) = tokio::io::duplex(1024 * 1024);
        let (read, write) = tokio::io::split(ours);
        let traffic = TrafficFilter::new("t".parse().unwrap(), Arc::default(), ByteBudget::default());
        let reader = LineReader::new(read, &traffic.buffers);
        let wire = UpstreamWire::new(reader, LineWriter(write), traffic);
        (wire, BufReader::new(theirs))
    }

    async fn next(server: &mut BufReader<DuplexStream>) -> Value {
        let mut line = String::new();
        server.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn send(wire: &UpstreamWire, lifecycle: McpLifecycle) -> DirectCall {
        let arguments = JsonObject::from_iter([("text".to_owned(), json!("hi"))]);
        DirectCall::send(
            wire,
            &RequestMetadata::new(lifecycle, OublietteClientHandler.get_info()),
            "echo",
            &arguments,
            None,
        )
        .unwrap()
    }

    #[tokio::test]
    async fn a_request_carries_the_meta_its_lifecycle_requires() {
        let (wire, mut server) = wire();
        let _older = send(&wire, McpLifecycle::Initialize);
        let request = next(&mut server).await;
        let id = request["id"].clone();
        let params = json!({"_meta": {"progressToken": id}, "name": "echo", "arguments": {"text": "hi"}});
        assert_eq!(
            request,
            json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
        );
        let _newer = send(&wire, McpLifecycle::Discover);
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
    async fn responses_reach_their_calls_in_any_order() {
        let (wire, _server) = wire();
        let (mut one, mut two) = (
            send(&wire, McpLifecycle::Initialize),
            send(&wire, McpLifecycle::Initialize),
        );
        let say = |id: i64, rest: &str| {
            let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{rest}}}");
            assert!(wire.traffic().handle_incoming(&Bytes::from(text)).is_none());
        };
        say(two.id, r#""error":{"code":-1,"message":"no"}"#);
        say(one.id, r#""result":{"content":[]}"#);
        assert!(matches!((&mut two.reply).await, Ok(CallReply::Refused(why)) if why == "no"));
        assert!(
            matches!((&mut one.reply).await, Ok(CallReply::Result(Ok(result))) if result.text == r#"{"content":[]}"#)
        );
    }

    #[tokio::test]
    async fn a_dropped_call_is_cancelled_unless_it_was_answered() {
        let (wire, mut server) = wire();
        let answered = send(&wire, McpLifecycle::Initialize);
        let text = format!("{{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":{{}}}}", answered.id);
        wire.traffic().handle_incoming(&Bytes::from(text));
        drop(answered);
        let given_up = send(&wire, McpLifecycle::Initialize);
        let id = given_up.id;
        drop(given_up);
        next(&mut server).await;
        assert_eq!(next(&mut server).await["method"], json!("tools/call"));
        let last = next(&mut server).await;
        assert_eq!(last["method"], json!("notifications/cancelled"));
        assert_eq!(last["params"]["requestId"], json!(id));
        assert!(!wire.traffic().forget_call(id), "nothing of it is left");
    }

    #[tokio::test]
    async fn a_closed_wire_refuses_new_calls_and_fails_unsent_ones() {
        let (wire, server) = wire();
        drop(server);
        let mut lost = send(&wire, McpLifecycle::Initialize);
        assert!(matches!(
            (&mut lost.reply).await,
            Ok(CallReply::SendFailed(SendFailure::MaybeWritten(_)))
        ));
        wire.close("over").await;
        let arguments = JsonObject::new();
        let metadata = RequestMetadata::new(McpLifecycle::Initialize, OublietteClientHandler.get_info());
        let refused = DirectCall::send(&wire, &metadata, "echo", &arguments, None);
        assert!(matches!(refused, Err(SendFailure::NotWritten(why)) if why.contains("closed")));
    }
}
