//! The built-in agent's model loop against fake providers on loopback, over real stdio and with a real
//! MCP server.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[allow(unreachable_pub, reason = "shared by tests")]
mod support;

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use support::{AgentUnderTest, StoredMemory, stub_server, wait_for_note};
use tokio::{net::TcpListener, sync::Notify};

/// How the fake provider answers a request.
enum ProviderAction {
    /// Stream these events.
    Stream(Vec<String>),
    /// Stream these events, then keep the connection open without sending more.
    StreamThenHang(Vec<String>),
    /// Answer with this status and body.
    Fail(u16, Value),
}

#[derive(Clone)]
struct FakeProvider {
    url: String,
    acts: Arc<Mutex<VecDeque<ProviderAction>>>,
    /// Path, headers and body of every request.
    requests: Arc<Mutex<Vec<(String, String, Value)>>>,
    arrived: Arc<Notify>,
}

impl FakeProvider {
    async fn start(acts: Vec<ProviderAction>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let provider = Self {
            url,
            acts: Arc::new(Mutex::new(acts.into())),
            requests: Arc::default(),
            arrived: Arc::default(),
        };
        let app = Router::new().fallback(answer).with_state(provider.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        provider
    }

    fn config(&self, model: &str) -> Value {
        json!({ "prompt": "Be brief.", "model": model, "script": null, "base_url": self.url, "retry_ms": 1 })
    }

    fn body(&self, request: usize) -> Value {
        self.requests.lock().unwrap()[request].2.clone()
    }

    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

async fn answer(State(provider): State<FakeProvider>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    provider
        .requests
        .lock()
        .unwrap()
        .push((parts.uri.to_string(), format!("{:?}", parts.headers), body));
    provider.arrived.notify_one();
    let act = provider.acts.lock().unwrap().pop_front();
    let sse = [("content-type", "text/event-stream")];
    let each = |events: Vec<String>| stream::iter(events.into_iter().map(Ok::<_, Infallible>));
    match act {
        Some(ProviderAction::Stream(events)) => (sse, Body::from_stream(each(events))).into_response(),
        Some(ProviderAction::StreamThenHang(events)) => {
            let hang = stream::once(std::future::pending::<Result<String, Infallible>>());
            (sse, Body::from_stream(each(events).chain(hang))).into_response()
        }
        Some(ProviderAction::Fail(status, body)) => {
            (http::StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
        }
        None => (http::StatusCode::IM_A_TEAPOT, "nothing more was expected").into_response(),
    }
}

fn sse_data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A chunk of an OpenAI stream.
fn openai_delta(delta: &Value) -> String {
    sse_data(
        &json!({ "id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] }),
    )
}

/// The last chunks of an OpenAI stream.
fn openai_finish(reason: &str) -> Vec<String> {
    vec![
        sse_data(
            &json!({ "id": "c", "model": "m", "choices": [{ "index": 0, "delta": {}, "finish_reason": reason }] }),
        ),
        sse_data(
            &json!({ "id": "c", "model": "m", "choices": [], "usage": { "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14 } }),
        ),
        "data: [DONE]\n\n".to_owned(),
    ]
}

fn stream_text(text: &str) -> ProviderAction {
    let pieces = text
        .split_inclusive(' ')
        .map(|piece| openai_delta(&json!({ "content": piece })));
    ProviderAction::Stream(pieces.chain(openai_finish("stop")).collect())
}

/// A stream that asks for these calls, their arguments split and interleaved as providers do.
fn stream_calls(calls: &[(&str, &str)]) -> ProviderAction {
    let mut events = vec![openai_delta(&json!({ "role": "assistant", "content": null }))];
    for (index, (tool, _)) in calls.iter().enumerate() {
        let call = json!([{ "index": index, "id": format!("id{index}"), "type": "function", "function": { "name": tool, "arguments": "" } }]);
        events.push(openai_delta(&json!({ "tool_calls": call })));
    }
    for half in 0..2 {
        for (index, (_, arguments)) in calls.iter().enumerate() {
            let (first, second) = arguments.split_at(arguments.len() / 2);
            let piece = if half == 0 { first } else { second };
            events.push(openai_delta(
                &json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] }),
            ));
        }
    }
    events.extend(openai_finish("tool_calls"));
    ProviderAction::Stream(events)
}

#[tokio::test]
async fn text_is_streamed_and_usage_reported() {
    let thinking = openai_delta(&json!({ "reasoning_content": "hmm" }));
    let ProviderAction::Stream(mut events) = stream_text("hello there friend") else {
        unreachable!()
    };
    events.insert(0, thinking);
    let provider = FakeProvider::start(vec![ProviderAction::Stream(events)]).await;
    let mut agent = AgentUnderTest::start(&provider.config("vllm/org/model-1"), StoredMemory::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "hi").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.agent_text(), "hello there friend");
    assert!(
        agent.updates_of_kind("agent_message_chunk").len() >= 3,
        "it streams"
    );
    assert_eq!(agent.agent_thoughts(), "hmm");
    assert_eq!(answer["result"]["_meta"]["usage"]["inputTokens"], 11);
    assert_eq!(answer["result"]["_meta"]["usage"]["totalTokens"], 14);
    assert_eq!(agent.updates_of_kind("usage_update")[0]["used"], 14);
    let (path, _, body) = provider.requests.lock().unwrap()[0].clone();
    assert_eq!(path, "/vllm/v1/chat/completions");
    assert_eq!(body["model"], "org/model-1");
    assert_eq!(body["stream"], true);
    assert_eq!(
        body["messages"][0],
        json!({ "role": "system", "content": "Be brief." })
    );
    assert_eq!(body["messages"][1], json!({ "role": "user", "content": "hi" }));
}

#[tokio::test]
async fn tools_are_called_side_by_side_and_their_results_go_back() {
    let dir = tempfile::tempdir().unwrap();
    let provider = FakeProvider::start(vec![
        stream_calls(&[
            ("meet", "{}"),
            ("meet", "{}"),
            ("odd_name_x", "{\"text\":\"héllo\"}"),
            ("fail", "{}"),
            ("echo", "{\"text\":"),
        ]),
        stream_text("done"),
    ])
    .await;
    let stored = StoredMemory::default();
    let mut agent = AgentUnderTest::start(&provider.config("openai/gpt-4o"), stored.clone());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.agent_text(), "done");
    let calls: Vec<&str> = agent
        .updates_of_kind("tool_call")
        .iter()
        .map(|c| c["title"].as_str().unwrap())
        .collect();
    assert_eq!(calls.len(), 5);
    assert!(
        calls.contains(&"odd.name/x"),
        "shown and called by its own name: {calls:?}"
    );
    let first = provider.body(0);
    let tools: Vec<&str> = first["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["function"]["name"].as_str().unwrap())
        .collect();
    assert!(
        tools.contains(&"odd_name_x") && tools.contains(&"echo"),
        "{tools:?}"
    );
    assert_eq!(first["tools"][0]["function"]["parameters"]["type"], "object");

    let second = provider.body(1);
    let messages = second["messages"].as_array().unwrap();
    let assistant = messages.iter().find(|m| m["role"] == "assistant").unwrap();
    assert_eq!(assistant["tool_calls"].as_array().unwrap().len(), 5);
    let results: Vec<(&str, &str)> = messages
        .iter()
        .filter(|m| m["role"] == "tool")
        .map(|m| {
            (
                m["tool_call_id"].as_str().unwrap(),
                m["content"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(results[0], ("id0", "met"));
    assert_eq!(results[1], ("id1", "met"));
    assert_eq!(results[2], ("id2", "héllo"));
    assert_eq!(results[3], ("id3", "Error: it did not work"));
    assert!(results[4].1.contains("not a JSON object"), "{results:?}");
    let kinds: Vec<Value> = stored.entries().iter().map(|e| e["kind"].clone()).collect();
    assert_eq!(kinds, ["user", "assistant", "results", "assistant"]);
}

#[tokio::test]
async fn a_loaded_session_continues_its_conversation() {
    let provider = FakeProvider::start(vec![stream_text("first answer"), stream_text("second answer")]).await;
    let stored = StoredMemory::default();
    let mut first = AgentUnderTest::start(&provider.config("ollama/qwen"), stored.clone());
    let session = first.open(json!([])).await;
    first.prompt(&session, "first question").await;
    first.child.kill().await.unwrap();

    let mut second = AgentUnderTest::start(&provider.config("ollama/qwen"), stored);
    second.load(&session, json!([])).await;
    second.prompt(&session, "second question").await;
    assert_eq!(second.agent_text(), "second answer");
    let texts: Vec<Value> = provider.body(1)["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["content"].clone())
        .collect();
    assert_eq!(
        texts,
        ["Be brief.", "first question", "first answer", "second question"]
    );
}

#[tokio::test]
async fn anthropic_is_called_with_its_own_api() {
    let dir = tempfile::tempdir().unwrap();
    let event = |value: Value| format!("event: {}\ndata: {value}\n\n", value["type"].as_str().unwrap());
    let started = event(
        json!({ "type": "message_start", "message": { "id": "m", "type": "message", "role": "assistant", "model": "c", "content": [], "usage": { "input_tokens": 20, "output_tokens": 1 } } }),
    );
    let ended = |reason: &str| {
        [
            event(
                json!({ "type": "message_delta", "delta": { "stop_reason": reason }, "usage": { "output_tokens": 9 } }),
            ),
            event(json!({ "type": "message_stop" })),
        ]
    };
    let block = |index: usize, start: Value, deltas: Vec<Value>| {
        let mut events = vec![event(
            json!({ "type": "content_block_start", "index": index, "content_block": start }),
        )];
        events.extend(
            deltas
                .into_iter()
                .map(|d| event(json!({ "type": "content_block_delta", "index": index, "delta": d }))),
        );
        events.push(event(json!({ "type": "content_block_stop", "index": index })));
        events
    };
    let mut wanted = vec![started.clone()];
    wanted.extend(block(
        0,
        json!({ "type": "thinking", "thinking": "", "signature": "" }),
        vec![
            json!({ "type": "thinking_delta", "thinking": "which tool?" }),
            json!({ "type": "signature_delta", "signature": "signed-by-claude" }),
        ],
    ));
    wanted.extend(block(
        1,
        json!({ "type": "text", "text": "" }),
        vec![json!({ "type": "text_delta", "text": "Looking. " })],
    ));
    for (index, id) in [(2, "toolu_1"), (3, "toolu_2")] {
        wanted.extend(block(
            index,
            json!({ "type": "tool_use", "id": id, "name": "meet", "input": {} }),
            vec![
                json!({ "type": "input_json_delta", "partial_json": "{\"text\":" }),
                json!({ "type": "input_json_delta", "partial_json": "\"x\"}" }),
            ],
        ));
    }
    wanted.extend(ended("tool_use"));
    let mut done = vec![started];
    done.extend(block(
        0,
        json!({ "type": "text", "text": "" }),
        vec![json!({ "type": "text_delta", "text": "Found." })],
    ));
    done.extend(ended("end_turn"));
    let provider =
        FakeProvider::start(vec![ProviderAction::Stream(wanted), ProviderAction::Stream(done)]).await;
    let mut agent = AgentUnderTest::start(
        &provider.config("anthropic/claude-sonnet-4-5"),
        StoredMemory::default(),
    );
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.agent_text(), "Looking. Found.");
    assert_eq!(agent.agent_thoughts(), "which tool?");
    assert_eq!(
        agent
            .updates_of_kind("tool_call_update")
            .iter()
            .filter(|u| u["status"] == "completed")
            .count(),
        2
    );
    let (path, headers, body) = provider.requests.lock().unwrap()[1].clone();
    assert_eq!(path, "/anthropic/v1/messages");
    assert!(headers.contains("anthropic-version"));
    assert!(body["max_tokens"].as_u64().unwrap() > 0);
    let messages = body["messages"].as_array().unwrap();
    assert_eq!(
        messages
            .iter()
            .map(|m| m["role"].as_str().unwrap())
            .collect::<Vec<_>>(),
        ["user", "assistant", "user"]
    );
    assert_eq!(
        messages[1]["content"][0]["signature"], "signed-by-claude",
        "signed reasoning goes back: {}",
        messages[1]
    );
    let results = messages[2]["content"].as_array().unwrap();
    assert_eq!(results.len(), 2, "both results in one message");
    assert_eq!(results[1]["tool_use_id"], "toolu_2");
}

#[tokio::test]
async fn gemini_is_called_with_its_own_api() {
    let dir = tempfile::tempdir().unwrap();
    let piece = |parts: Value, end: Value| {
        sse_data(
            &json!({ "candidates": [{ "content": { "role": "model", "parts": parts }, "finishReason": end }], "usageMetadata": { "promptTokenCount": 5, "candidatesTokenCount": 2, "totalTokenCount": 7 } }),
        )
    };
    let call = json!([{ "functionCall": { "name": "echo", "args": { "text": "from gemini" } }, "thoughtSignature": "signed-by-gemini" }]);
    let provider = FakeProvider::start(vec![
        ProviderAction::Stream(vec![piece(call, json!("STOP"))]),
        ProviderAction::Stream(vec![piece(json!([{ "text": "fine" }]), json!("STOP"))]),
    ])
    .await;
    let mut agent = AgentUnderTest::start(&provider.config("gemini/gemini-3-pro"), StoredMemory::default());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.agent_text(), "fine");
    let (path, _, body) = provider.requests.lock().unwrap()[1].clone();
    assert_eq!(
        path,
        "/gemini/v1beta/models/gemini-3-pro:streamGenerateContent?alt=sse"
    );
    let text = body["contents"].to_string();
    assert!(
        text.contains("functionResponse")
            && text.contains("from gemini")
            && text.contains("signed-by-gemini"),
        "{text}"
    );
}

#[tokio::test]
async fn cancel_stops_a_stream_and_keeps_the_text_so_far() {
    let hello = openai_delta(&json!({ "content": "I was about to" }));
    let provider = FakeProvider::start(vec![
        ProviderAction::StreamThenHang(vec![hello]),
        stream_text("next"),
    ])
    .await;
    let stored = StoredMemory::default();
    let mut agent = AgentUnderTest::start(&provider.config("x/y"), stored.clone());
    let session = agent.open(json!([])).await;
    let prompt = agent.start_prompt(&session, "go").await;
    agent.wait_for_update("agent_message_chunk").await;
    agent
        .notify("session/cancel", json!({ "sessionId": session }))
        .await;
    let answer = agent.wait_for_answer(prompt).await;
    assert_eq!(answer["result"]["stopReason"], "cancelled");
    assert_eq!(stored.entries()[1]["text"], "I was about to");
    agent.prompt(&session, "and?").await;
    assert_eq!(agent.agent_text(), "next");
}

#[tokio::test]
async fn cancel_during_a_call_leaves_a_valid_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let notes = dir.path().join("notes");
    let provider = FakeProvider::start(vec![stream_calls(&[("wait", "{}")]), stream_text("next")]).await;
    let mut agent = AgentUnderTest::start(&provider.config("x/y"), StoredMemory::default());
    let session = agent.open(json!([stub_server(&notes)])).await;
    let prompt = agent.start_prompt(&session, "go").await;
    agent.wait_for_update("tool_call").await;
    wait_for_note(&notes, "call wait").await;
    agent
        .notify("session/cancel", json!({ "sessionId": session }))
        .await;
    assert_eq!(
        agent.wait_for_answer(prompt).await["result"]["stopReason"],
        "cancelled"
    );
    wait_for_note(&notes, "cancelled wait").await;
    assert_eq!(provider.count(), 1, "the model is not asked again");
    agent.prompt(&session, "and?").await;
    let roles: Vec<Value> = provider.body(1)["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["role"].clone())
        .collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool", "user"]);
}

#[tokio::test]
async fn transient_failures_are_retried_then_reported() {
    let busy = || ProviderAction::Fail(503, json!({ "error": { "message": "overloaded" } }));
    let provider = FakeProvider::start(vec![
        ProviderAction::Fail(429, json!({})),
        busy(),
        ProviderAction::Stream(vec![]),
        stream_text("at last"),
    ])
    .await;
    let mut agent = AgentUnderTest::start(&provider.config("x/y"), StoredMemory::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.agent_text(), "at last");
    assert_eq!(provider.count(), 4);

    provider.acts.lock().unwrap().extend((0..5).map(|_| busy()));
    let answer = agent.prompt(&session, "again").await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("\"x\"") && message.contains("503") && message.contains("overloaded"),
        "{message}"
    );
    assert!(message.contains("5 times"), "{message}");
    assert_eq!(answer["error"]["data"]["status"], 503);

    provider.acts.lock().unwrap().push_back(ProviderAction::Fail(
        401,
        json!({ "error": { "message": "wrong key" } }),
    ));
    let answer = agent.prompt(&session, "once more").await;
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("401: wrong key"),
        "{answer}"
    );
    assert_eq!(provider.count(), 10, "a refusal is not retried");
    provider.acts.lock().unwrap().push_back(stream_text("well again"));
    assert_eq!(
        agent.prompt(&session, "now?").await["result"]["stopReason"],
        "end_turn"
    );
}

#[tokio::test]
async fn an_answer_that_ends_early_is_not_requested_again() {
    let error = sse_data(&json!({ "error": { "message": "upstream fell over" } }));
    let provider = FakeProvider::start(vec![ProviderAction::Stream(vec![
        openai_delta(&json!({ "content": "half" })),
        error,
    ])])
    .await;
    let mut agent = AgentUnderTest::start(&provider.config("x/y"), StoredMemory::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "go").await;
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("upstream fell over"),
        "{answer}"
    );
    assert_eq!(provider.count(), 1);
    assert_eq!(agent.agent_text(), "half");
}

#[tokio::test]
async fn requests_per_turn_are_limited() {
    let dir = tempfile::tempdir().unwrap();
    let provider = FakeProvider::start((0..9).map(|_| stream_calls(&[("echo", "{}")])).collect()).await;
    let mut config = provider.config("x/y");
    config["max_iterations"] = json!(3);
    let mut agent = AgentUnderTest::start(&config, StoredMemory::default());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "max_turn_requests", "{answer}");
    assert_eq!(provider.count(), 3);
    assert_eq!(answer["result"]["_meta"]["usage"]["requests"], 3);
}

#[tokio::test]
async fn a_changed_tool_list_is_listed_again() {
    let dir = tempfile::tempdir().unwrap();
    let provider = FakeProvider::start(vec![
        stream_calls(&[("grow", "{}")]),
        stream_calls(&[("grown", "{\"text\":\"new\"}")]),
        stream_text("ok"),
    ])
    .await;
    let mut agent = AgentUnderTest::start(&provider.config("x/y"), StoredMemory::default());
    let session = agent.open(json!([stub_server(&dir.path().join("notes"))])).await;
    agent.prompt(&session, "go").await;
    let names = |request| provider.body(request)["tools"].to_string();
    assert!(!names(0).contains("grown"));
    assert!(names(1).contains("\"grown\""), "{}", names(1));
}

#[tokio::test]
async fn a_conversation_that_is_too_long_is_shortened() {
    let long = "x".repeat(3000);
    let too_long = ProviderAction::Fail(
        400,
        json!({ "error": { "message": "maximum context length is 10 tokens" } }),
    );
    let provider = FakeProvider::start(vec![
        stream_text(&long),
        stream_text(&long),
        stream_text("three"),
        too_long,
        stream_text("four"),
    ])
    .await;
    let stored = StoredMemory::default();
    let mut config = provider.config("x/y");
    config["context_chars"] = json!(5000);
    let mut agent = AgentUnderTest::start(&config, stored.clone());
    let session = agent.open(json!([])).await;
    for prompt in ["one", "two", "three", "four"] {
        let answer = agent.prompt(&session, prompt).await;
        assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    }
    assert!(
        provider.body(2)["messages"].to_string().len() < 5000,
        "cut before it was sent"
    );
    assert_eq!(
        agent.agent_text(),
        "four",
        "and again when the provider asked for it"
    );
    assert!(
        stored.entries()[0]["kind"] == "forgotten",
        "{:?}",
        stored.entries()
    );
    assert!(json!(stored.entries()).to_string().len() < 5000);
}

#[tokio::test]
async fn a_missing_forwarder_is_reported_as_a_connection_error() {
    let config = json!({ "prompt": "", "model": "x/y", "base_url": "http://127.0.0.1:1", "retry_ms": 1 });
    let mut agent = AgentUnderTest::start(&config, StoredMemory::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "go").await;
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("connection"),
        "{answer}"
    );
}
