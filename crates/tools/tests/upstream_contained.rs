//! A server that hangs, floods, sends too much, never reads or lies fails its own calls, with a reason, and
//! affects no other server.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use std::sync::Arc;

use oubliette_protocol::{ErrorCode, tool::HealthStatus};
use oubliette_tools::{CallContext, upstream::Upstream};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, sync::mpsc};
use tokio_util::sync::CancellationToken;
use upstream_support::{
    UpstreamFixture, call_text, object, raw, remote_definition, server::ToolServer, soon, tcp_server,
};

/// Calls a tool and returns the error it must fail with.
async fn call_error(upstream: &Upstream, tool: &str) -> oubliette_protocol::Error {
    soon(
        tool,
        upstream.call(tool, object(json!({})), &CallContext::default()),
    )
    .await
    .unwrap_err()
}

/// A well-behaved server beside the one under test, to show that it is not affected.
async fn bystander() -> Arc<Upstream> {
    let address = tcp_server(ToolServer::default(), CancellationToken::new()).await;
    UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_to_a_hanging_server_times_out_and_is_cancelled() {
    let (heard, mut hears) = mpsc::unbounded_channel();
    let address = raw::listen(move |mut peer| {
        let heard = heard.clone();
        async move {
            peer.complete_startup(raw::tools(&["hang", "quick"])).await;
            while let Some(message) = peer.next().await {
                match (message["method"].as_str(), message["params"]["name"].as_str()) {
                    (Some("tools/call"), Some("quick")) => peer.answer(&message, json!({"content":[]})).await,
                    (Some("tools/call"), _) => drop(heard.send(("called", message["id"].clone()))),
                    (Some("notifications/cancelled"), _) => {
                        drop(heard.send(("cancelled", message["params"]["requestId"].clone())));
                    }
                    _ => {}
                }
            }
        }
    })
    .await;
    let fixture = UpstreamFixture::new(remote_definition(
        "tcp",
        address,
        json!({"timeouts":{"startupMs":15000,"requestMs":5000}}),
    ));
    let upstream = fixture.start_ready().await;
    let hang = || {
        let upstream = upstream.clone();
        tokio::spawn(async move { call_error(&upstream, "hang").await })
    };
    let hanging = hang();
    let (what, called) = soon("the call", hears.recv()).await.unwrap();
    assert_eq!(what, "called");
    call_text(&upstream, "quick", json!({})).await;
    let error = hanging.await.unwrap();
    assert_eq!(error.code, ErrorCode::Timeout);
    assert!(error.message.contains("5000 ms"), "{}", error.message);
    let told = soon("notifications/cancelled", hears.recv()).await.unwrap();
    assert_eq!(told, ("cancelled", called));
    // Dropping the call's future cancels it at the server too.
    let dropped = hang();
    let (what, called) = soon("the call", hears.recv()).await.unwrap();
    assert_eq!(what, "called");
    dropped.abort();
    let told = soon("notifications/cancelled", hears.recv()).await.unwrap();
    assert_eq!(told, ("cancelled", called));
    assert_eq!(upstream.status().status, HealthStatus::Green);
    call_text(&upstream, "quick", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tcp_server_that_sends_100_megabytes_is_disconnected() {
    let address = raw::listen(|mut peer| async move {
        peer.complete_startup(raw::tools(&["big"])).await;
        let call = peer.expect_method("tools/call").await;
        if peer.number > 0 {
            peer.answer(&call, json!({"content":[{"type":"text","text":"small"}]}))
                .await;
            return peer.drain().await;
        }
        let start = format!(
            r#"{{"jsonrpc":"2.0","id":{},"result":{{"content":[{{"type":"text","text":""#,
            call["id"]
        );
        peer.write.write_all(start.as_bytes()).await.unwrap();
        let chunk = vec![b'x'; 1024 * 1024];
        for _ in 0..100 {
            if peer.write.write_all(&chunk).await.is_err() {
                return;
            }
        }
        panic!("all of it was read");
    })
    .await;
    let fixture = UpstreamFixture::new(remote_definition("tcp", address, json!({})));
    let upstream = fixture.start_ready().await;
    let other = bystander().await;
    let error = call_error(&upstream, "big").await;
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("larger than 16 MiB"), "{}", error.message);
    assert_eq!(call_text(&other, "echo", json!({"text":"x"})).await, "x");
    assert_eq!(
        call_text(&upstream, "big", json!({})).await,
        "small",
        "it is connected to again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_server_that_sends_100_megabytes_is_disconnected() {
    use axum::{Router, body::Body, http::header, response::IntoResponse, routing::post};
    async fn serve(body: String, kind: &'static str) -> axum::response::Response {
        let message: Value = serde_json::from_str(&body).unwrap();
        let result = match message["method"].as_str().unwrap() {
            "initialize" => raw::initialize_result(),
            "tools/list" => json!({"tools":raw::tools(&["big"])}),
            "tools/call" => {
                let start = if kind == "text/event-stream" {
                    "data: "
                } else {
                    "{\"x\":\""
                };
                let flood = futures::stream::iter(std::iter::repeat_n("x".repeat(1 << 20), 100));
                let chunks =
                    futures::StreamExt::chain(futures::stream::once(async move { start.to_owned() }), flood);
                let chunks = futures::StreamExt::map(chunks, Ok::<_, std::io::Error>);
                return ([(header::CONTENT_TYPE, kind)], Body::from_stream(chunks)).into_response();
            }
            _ => return axum::http::StatusCode::ACCEPTED.into_response(),
        };
        let answer = json!({"jsonrpc":"2.0","id":message["id"],"result":result}).to_string();
        ([(header::CONTENT_TYPE, "application/json")], answer).into_response()
    }
    for kind in ["application/json", "text/event-stream"] {
        let router = Router::new().route("/mcp", post(move |body: String| serve(body, kind)));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        let fixture = UpstreamFixture::new(remote_definition(
            "http",
            format!("http://{address}/mcp"),
            json!({}),
        ));
        let upstream = fixture.start_ready().await;
        let error = call_error(&upstream, "big").await;
        assert!(
            error.message.contains("larger than 16 MiB"),
            "{kind}: {}",
            error.message
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flooding_server_is_throttled_and_still_answers() {
    let address = raw::listen(|mut peer| async move {
        peer.complete_startup(raw::tools(&["a"])).await;
        let raw::RawServerConnection { mut lines, mut write, .. } = peer;
        let (sender, mut answers) = mpsc::unbounded_channel::<String>();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let message: Value = serde_json::from_str(&line).unwrap();
                let result = json!({"content":[{"type":"text","text":"through the flood"}]});
                let _ = sender.send(json!({"jsonrpc":"2.0","id":message["id"],"result":result}).to_string() + "\n");
            }
        });
        let noise = [
            json!({"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x".repeat(4000)}}),
            json!({"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1}}),
            json!({"jsonrpc":"2.0","method":"notifications/unheard_of"}),
            json!({"jsonrpc":"2.0","id":"q","method":"sampling/createMessage","params":{}}),
            json!({"jsonrpc":"2.0","id":99999,"result":{}}),
            json!(["no", "message"]),
        ];
        let flood: String = noise.iter().map(|message| format!("{message}\nnoise\n")).collect::<String>().repeat(20);
        loop {
            while let Ok(answer) = answers.try_recv() {
                if write.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
            if write.write_all(flood.as_bytes()).await.is_err() {
                return;
            }
        }
    })
    .await;
    let fixture = UpstreamFixture::new(remote_definition("tcp", address, json!({})));
    let upstream = fixture.start_ready().await;
    let other = bystander().await;
    for _ in 0..3 {
        assert_eq!(call_text(&upstream, "a", json!({})).await, "through the flood");
        assert_eq!(call_text(&other, "echo", json!({"text":"x"})).await, "x");
    }
    soon("the stop", upstream.stop("enough")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_reads_delays_no_other_server() {
    let address = raw::listen(|mut peer| async move {
        peer.complete_startup(raw::tools(&["a"])).await;
        // Keeps the connection open and reads nothing more.
        std::future::pending::<()>().await;
        drop(peer);
    })
    .await;
    let fixture = UpstreamFixture::new(remote_definition(
        "tcp",
        address,
        json!({"timeouts":{"startupMs":15000,"requestMs":1000}}),
    ));
    let upstream = fixture.start_ready().await;
    let other = bystander().await;
    let filling = "x".repeat(8 * 1024 * 1024);
    let calls = (0..16).map(|_| {
        let (upstream, arguments) = (upstream.clone(), object(json!({ "filling": filling })));
        async move {
            upstream
                .call("a", arguments, &CallContext::default())
                .await
                .unwrap_err()
        }
    });
    let errors = soon("all calls", futures::future::join_all(calls)).await;
    assert!(
        errors.iter().any(|error| error.code == ErrorCode::Timeout),
        "some were sent, as far as it goes"
    );
    let full = errors
        .iter()
        .find(|error| error.code == ErrorCode::Unavailable)
        .unwrap();
    assert!(full.message.contains("does not read"), "{}", full.message);
    assert_eq!(call_text(&other, "echo", json!({"text":"x"})).await, "x");
    soon("the stop", upstream.stop("enough")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_tools_in_a_list_do_not_cost_the_valid_ones() {
    let address = raw::listen(|mut peer| async move {
        let long = "n".repeat(10_000);
        peer.complete_startup(json!([
            {"name":"good","description":"fine","inputSchema":{"type":"object","properties":{"a":{"type":"string"}}}},
            {"name":"liar","inputSchema":{"type":"array"}},
            {"name":"wrong","inputSchema":"not even an object"},
            {"name":"bare"},
            {"name":long,"inputSchema":{"type":"object"}},
            {"name":"good","inputSchema":{"type":"object"}},
            {"name":7,"inputSchema":{"type":"object"}},
            "nothing",
        ]))
        .await;
        while let Some(call) = peer.next().await {
            // Its results are invalid too.
            match call["params"]["name"].as_str() {
                Some("good") => peer.answer(&call, json!({"content":[{"type":"text","text":"ok"}]})).await,
                Some("liar") => peer.answer(&call, json!({"content":"text"})).await,
                Some("wrong") => peer.answer(&call, json!([1])).await,
                _ => peer.answer(&call, json!({})).await,
            }
        }
    })
    .await;
    let upstream = UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await;
    let tools = upstream.tools();
    let names: Vec<&str> = tools.iter().map(|tool| &*tool.name).collect();
    // The over-long and the repeated name are kept here: the registry refuses them, where users see it.
    assert_eq!(names[..4], ["good", "liar", "wrong", "bare"]);
    assert!(
        names[4].starts_with("nnn") && names[4].len() == 256,
        "{}",
        names[4]
    );
    assert_eq!(names[5..], ["good"]);
    assert_eq!(tools[0].note, None);
    for tool in &tools[1..] {
        assert_eq!(*tool.input_schema, json!({"type":"object"}));
    }
    assert!(tools[1].note.is_some() && tools[2].note.is_some());
    assert_eq!(call_text(&upstream, "good", json!({})).await, "ok");
    for tool in ["liar", "wrong"] {
        let error = call_error(&upstream, tool).await;
        assert_eq!(error.code, ErrorCode::ToolError);
        assert!(error.message.contains("no tool result"), "{}", error.message);
    }
    assert_eq!(call_text(&upstream, "bare", json!({})).await, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_an_endless_tool_list_fails_to_start() {
    for (turn, word) in [(true, "earlier one"), (false, "more than 20000 tools")] {
        let address = raw::listen(move |mut peer| async move {
            peer.initialize().await;
            let mut page = 0;
            while let Some(request) = peer.next().await {
                page += 1;
                let tools: Vec<Value> = (0..1000)
                    .map(|n| json!({"name":format!("t{page}-{n}")}))
                    .collect();
                let cursor = if turn {
                    "again".to_owned()
                } else {
                    page.to_string()
                };
                peer.answer(&request, json!({"tools":tools,"nextCursor":cursor}))
                    .await;
            }
        })
        .await;
        let upstream = UpstreamFixture::new(remote_definition(
            "tcp",
            address,
            json!({"restart":{"maxAttempts":0}}),
        ))
        .start()
        .await;
        let error = upstream.status().error.unwrap();
        assert!(error.contains(word), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_tools_are_listed() {
    let address = raw::listen(|mut peer| async move {
        let schema = json!({"type":"object","properties":{"path":{"type":"string"}},"required":["path"]});
        let tools =
            (0..10_000).map(|n| json!({"name":format!("t{n}"),"description":"d","inputSchema":schema}));
        peer.complete_startup(tools.collect()).await;
        peer.drain().await;
    })
    .await;
    let upstream = UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await;
    assert_eq!(upstream.tools().len(), 10_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_from_a_server_are_refused() {
    let (sender, mut answers) = mpsc::unbounded_channel();
    let address = raw::listen(move |mut peer| {
        let sender = sender.clone();
        async move {
            peer.complete_startup(raw::tools(&["a"])).await;
            let sampling = json!({"messages":[],"maxTokens":1});
            let elicit = json!({"message":"who?","requestedSchema":{"type":"object","properties":{}}});
            for (id, method, params) in [
                (1, "sampling/createMessage", sampling),
                (2, "elicitation/create", elicit),
                (3, "roots/list", json!({})),
                (4, "ping", json!({})),
                (5, "oubliette/open_the_door", json!({})),
            ] {
                peer.send(json!({"jsonrpc":"2.0","id":id,"method":method,"params":params}))
                    .await;
            }
            while let Some(answer) = peer.next().await {
                let _ = sender.send(answer);
            }
        }
    })
    .await;
    let _upstream = UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await;
    let mut seen = std::collections::BTreeMap::new();
    while seen.len() < 5 {
        let answer = soon("an answer", answers.recv()).await.unwrap();
        seen.insert(answer["id"].as_i64().unwrap(), answer);
    }
    assert_eq!(seen[&1]["error"]["code"], -32601);
    assert!(seen[&2]["error"].is_object() || seen[&2]["result"]["action"] == "decline");
    assert!(seen[&3]["error"].is_object() || seen[&3]["result"]["roots"] == json!([]));
    assert_eq!(seen[&4]["result"], json!({}));
    assert_eq!(seen[&5]["error"]["code"], -32601);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_text_is_bounded() {
    let address = raw::listen(|mut peer| async move {
        peer.complete_startup(raw::tools(&["a"])).await;
        while let Some(call) = peer.next().await {
            peer.refuse(&call, -32000, &"y".repeat(1 << 20)).await;
        }
    })
    .await;
    let upstream = UpstreamFixture::new(remote_definition("tcp", address, json!({})))
        .start_ready()
        .await;
    let error = call_error(&upstream, "a").await;
    assert_eq!(error.code, ErrorCode::ToolError);
    assert!(error.message.len() <= 8192, "{}", error.message.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_during_a_start_does_not_wait_for_it() {
    let address = raw::listen(|mut peer| async move { peer.drain().await }).await;
    let fixture = UpstreamFixture::new(remote_definition(
        "tcp",
        address,
        json!({"timeouts":{"startupMs":600_000}}),
    ));
    let upstream = Upstream::start(fixture.spec.clone());
    let waiting = tokio::spawn({
        let upstream = upstream.clone();
        async move { call_error(&upstream, "a").await }
    });
    soon("the stop", upstream.stop("changed my mind")).await;
    soon("settled", upstream.wait_first_start()).await;
    assert!(waiting.await.unwrap().message.contains("changed my mind"));
    soon("the second stop", upstream.stop("again")).await;
}
