//! Calls of an agent while its session's context is being built: over the relay socket and over handed-off streams
//! they wait for it, and fail when none is being built.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[allow(dead_code, unreachable_pub, missing_docs)]
#[path = "../../tools/tests/upstream_support/raw.rs"]
mod raw;

use std::{
    os::{fd::AsFd as _, unix::net::UnixStream as StdUnixStream},
    path::PathBuf,
};

use common::{InProcessServer, siblings::build_sibling_programs};
use oubliette_handoff::handshake::{HandoffReader, hand_off};
use oubliette_protocol::{SessionId, event::SessionStatus, relay::HANDOFF_SOCKET_NAME};
use oubliette_store::SessionPatch;
use raw::RawServerConnection;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncWriteExt as _, BufReader, Lines},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
};

/// A server with one idle session whose agent uses one tool server, which this test serves by hand.
struct BuildFixture {
    server: InProcessServer,
    session: SessionId,
    connections: mpsc::UnboundedReceiver<RawServerConnection>,
}

impl BuildFixture {
    async fn new() -> Self {
        // The sandbox is probed with the client; without it the relay socket would refuse this process.
        build_sibling_programs();
        let server = InProcessServer::start().await;
        let (connected, connections) = mpsc::unbounded_channel();
        let address = raw::listen(move |connection| {
            let connected = connected.clone();
            async move { drop(connected.send(connection)) }
        })
        .await;
        let entry = json!({"id":"held","kind":"mcp","transport":"tcp","endpoint":address.to_string(),
            "timeouts":{"startupMs":60000,"requestMs":60000}});
        let library = &server.app.library;
        library.tool_put("held".parse().unwrap(), entry).await.unwrap();
        let agent = json!({"name":"a","prompt":"p","model":"script:s.json","tools":{"use":["held"]}});
        let files = [("s.json".to_owned(), json!({"turns":[]}).to_string())].into();
        library
            .agent_put("demo".parse().unwrap(), agent, files)
            .await
            .unwrap();
        let project = server.project("p").await;
        let session = server.session(&project, None).await;
        let idle = SessionPatch {
            status: Some(SessionStatus::Idle),
            ..SessionPatch::default()
        };
        server.app.store.session_update(&session, idle).await.unwrap();
        // Brings the session into memory, which binds its sockets.
        server.app.sessions.plane(&session).await.unwrap();
        Self {
            server,
            session,
            connections,
        }
    }

    /// Has the context built, up to where its tool server is to answer `initialize`.
    async fn begin_build(&mut self) -> (RawServerConnection, Value) {
        let (sessions, session) = (self.server.app.sessions.clone(), self.session.clone());
        tokio::spawn(async move {
            let owner = oubliette_protocol::Principal::owner();
            sessions.tool_list(&owner, &session).await
        });
        let mut connection = self.connections.recv().await.unwrap();
        let initialize = connection.expect_method("initialize").await;
        (connection, initialize)
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.server.app.home.socket_dir(&self.session).join(name)
    }
}

/// Completes the start of the tool server and answers the one call it gets.
async fn serve_one_call(mut connection: RawServerConnection, initialize: &Value) {
    connection.answer(initialize, raw::initialize_result()).await;
    let list = connection.expect_method("tools/list").await;
    connection
        .answer(&list, json!({ "tools": raw::tools(&["echo"]) }))
        .await;
    let call = connection.expect_method("tools/call").await;
    assert_eq!(call["params"]["arguments"], json!({"n": 1}));
    connection.answer(&call, text_result("served")).await;
    connection.drain().await;
}

fn text_result(text: &str) -> Value {
    json!({"content":[{"type":"text","text":text}],"isError":false})
}

/// JSON-RPC lines to and from one end.
struct LineClient<R> {
    lines: Lines<BufReader<R>>,
    write: OwnedWriteHalf,
}

impl<R: AsyncRead + Unpin> LineClient<R> {
    async fn send(&mut self, message: Value) {
        self.write
            .write_all(format!("{message}\n").as_bytes())
            .await
            .unwrap();
    }

    /// The next response.
    async fn response(&mut self) -> Value {
        loop {
            let line = self.lines.next_line().await.unwrap().expect("a response");
            let message: Value = serde_json::from_str(&line).unwrap();
            if message.get("method").is_none() {
                return message;
            }
        }
    }
}

async fn relay_client(fixture: &BuildFixture) -> LineClient<OwnedReadHalf> {
    let (read, write) = UnixStream::connect(fixture.socket("relay.sock"))
        .await
        .unwrap()
        .into_split();
    LineClient {
        lines: BufReader::new(read).lines(),
        write,
    }
}

fn relay_request(id: u64, method: &str, params: Value) -> Value {
    json!({"jsonrpc":"2.0","id":id,"method":method,"params":params})
}

/// An agent whose client has handed its streams off, after its handshake.
struct HandedOffAgent {
    agent: LineClient<OwnedReadHalf>,
    /// What the server forwards to the client.
    forwarded: Lines<BufReader<HandoffReader>>,
    _to_agent: OwnedWriteHalf,
}

impl HandedOffAgent {
    async fn new(fixture: &BuildFixture) -> Self {
        let (stdin, agent_writes) = StdUnixStream::pair().unwrap();
        let (stdout, agent_reads) = StdUnixStream::pair().unwrap();
        let socket = fixture.socket(HANDOFF_SOCKET_NAME);
        let handoff = hand_off(&socket, stdin.as_fd(), stdout.as_fd(), None)
            .await
            .unwrap();
        let (forwarded, to_agent) = handoff.into_split();
        for stream in [&agent_writes, &agent_reads] {
            stream.set_nonblocking(true).unwrap();
        }
        let (_, write) = UnixStream::from_std(agent_writes).unwrap().into_split();
        let (read, _) = UnixStream::from_std(agent_reads).unwrap().into_split();
        let mut handed_off = Self {
            agent: LineClient {
                lines: BufReader::new(read).lines(),
                write,
            },
            forwarded: BufReader::new(forwarded).lines(),
            _to_agent: to_agent,
        };
        let initialize = json!({"jsonrpc":"2.0","id":0,"method":"initialize","params":{}});
        handed_off.agent.send(initialize).await;
        let initialized = json!({"jsonrpc":"2.0","method":"notifications/initialized"});
        handed_off.agent.send(initialized).await;
        handed_off
    }

    /// Calls a tool; returns when the server has taken the call.
    async fn start_call(&mut self, id: u64) {
        let params = json!({"name":"held_echo","arguments":{"n":1}});
        self.agent.send(relay_request(id, "tools/call", params)).await;
        // Lines are read in order, and this one is forwarded to the client.
        self.agent
            .send(json!({"jsonrpc":"2.0","id":"p","method":"ping"}))
            .await;
        loop {
            let line = self.forwarded.next_line().await.unwrap().unwrap();
            assert!(!line.contains("tools/call"), "the server answers calls itself");
            if line.contains("ping") {
                return;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_over_the_relay_socket_waits_for_the_context_being_built() {
    let mut fixture = BuildFixture::new().await;
    let (connection, initialize) = fixture.begin_build().await;
    let mut relay = relay_client(&fixture).await;
    let params = json!({"tool":"held_echo","arguments":{"n":1}});
    relay.send(relay_request(1, "agent_call_tool", params)).await;
    relay.send(relay_request(2, "agent_tools", json!({}))).await;
    assert_eq!(relay.response().await["id"], 2, "the call waits");
    tokio::spawn(async move { serve_one_call(connection, &initialize).await });
    let answer = relay.response().await;
    assert_eq!(
        (&answer["id"], &answer["result"]),
        (&json!(1), &text_result("served"))
    );
    fixture.server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_over_handed_off_streams_waits_for_the_context_being_built() {
    let mut fixture = BuildFixture::new().await;
    let (connection, initialize) = fixture.begin_build().await;
    let mut handed_off = HandedOffAgent::new(&fixture).await;
    handed_off.start_call(1).await;
    tokio::spawn(async move { serve_one_call(connection, &initialize).await });
    let answer = handed_off.agent.response().await;
    assert_eq!(
        (&answer["id"], &answer["result"]),
        (&json!(1), &text_result("served"))
    );
    fixture.server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_call_can_be_cancelled_and_leaves_the_connection_usable() {
    let mut fixture = BuildFixture::new().await;
    let (connection, initialize) = fixture.begin_build().await;
    let mut relay = relay_client(&fixture).await;
    let params = json!({"tool":"held_echo","arguments":{"n":2}});
    relay.send(relay_request(1, "agent_call_tool", params)).await;
    relay
        .send(json!({"jsonrpc":"2.0","method":"cancel","params":{"id":1}}))
        .await;
    let params = json!({"tool":"held_echo","arguments":{"n":1}});
    relay.send(relay_request(2, "agent_call_tool", params)).await;
    // Were the first call made all the same, its arguments would not be those the tool server expects.
    tokio::spawn(async move { serve_one_call(connection, &initialize).await });
    let answer = loop {
        let answer = relay.response().await;
        if answer["id"] == 2 {
            break answer;
        }
        assert!(answer.get("error").is_some(), "{answer}");
    };
    assert_eq!(answer["result"], text_result("served"));
    fixture.server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_fails_clearly_when_no_context_is_being_built() {
    let fixture = BuildFixture::new().await;
    let mut relay = relay_client(&fixture).await;
    let params = json!({"tool":"held_echo","arguments":{"n":1}});
    relay.send(relay_request(1, "agent_call_tool", params)).await;
    let error = relay.response().await["error"].clone();
    assert_eq!(error["data"]["code"], "unavailable", "{error}");
    assert_eq!(
        error["message"],
        "the agent's tools are not ready: its context is not built"
    );
    let mut handed_off = HandedOffAgent::new(&fixture).await;
    handed_off.start_call(1).await;
    let answer = handed_off.agent.response().await;
    assert_eq!(answer["result"]["isError"], true, "{answer}");
    assert_eq!(
        answer["result"]["structuredContent"]["error"]["code"], "unavailable",
        "{answer}"
    );
    fixture.server.stop().await;
}
