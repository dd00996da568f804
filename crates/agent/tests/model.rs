//! The built-in agent's model loop against scripted providers on loopback, over real stdio and with
//! a real MCP server.

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
use support::{Agent, Kept, noted, server};
use tokio::{net::TcpListener, sync::Notify};

/// What a provider does next.
enum Act {
    /// Stream these events.
    Stream(Vec<String>),
    /// Stream these events, then nothing more until told.
    StreamThenHang(Vec<String>),
    /// Answer with this status and body.
    Fail(u16, Value),
}

#[derive(Clone)]
struct Provider {
    url: String,
    acts: Arc<Mutex<VecDeque<Act>>>,
    /// Path, headers and body of every request.
    asked: Arc<Mutex<Vec<(String, String, Value)>>>,
    arrived: Arc<Notify>,
}

impl Provider {
    async fn start(acts: Vec<Act>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let provider = Self {
            url,
            acts: Arc::new(Mutex::new(acts.into())),
            asked: Arc::default(),
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
        self.asked.lock().unwrap()[request].2.clone()
    }

    fn count(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

async fn answer(State(provider): State<Provider>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    provider
        .asked
        .lock()
        .unwrap()
        .push((parts.uri.to_string(), format!("{:?}", parts.headers), body));
    provider.arrived.notify_one();
    let act = provider.acts.lock().unwrap().pop_front();
    let sse = [("content-type", "text/event-stream")];
    let each = |events: Vec<String>| stream::iter(events.into_iter().map(Ok::<_, Infallible>));
    match act {
        Some(Act::Stream(events)) => (sse, Body::from_stream(each(events))).into_response(),
        Some(Act::StreamThenHang(events)) => {
            let hang = stream::once(std::future::pending::<Result<String, Infallible>>());
            (sse, Body::from_stream(each(events).chain(hang))).into_response()
        }
        Some(Act::Fail(status, body)) => {
            (http::StatusCode::from_u16(status).unwrap(), axum::Json(body)).into_response()
        }
        None => (http::StatusCode::IM_A_TEAPOT, "nothing more was expected").into_response(),
    }
}

fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A piece of an OpenAI stream.
fn delta(delta: &Value) -> String {
    data(
        &json!({ "id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] }),
    )
}

/// The end of one.
fn finish(reason: &str) -> Vec<String> {
    vec![
        data(
            &json!({ "id": "c", "model": "m", "choices": [{ "index": 0, "delta": {}, "finish_reason": reason }] }),
        ),
        data(
            &json!({ "id": "c", "model": "m", "choices": [], "usage": { "prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14 } }),
        ),
        "data: [DONE]\n\n".to_owned(),
    ]
}

fn says(text: &str) -> Act {
    let pieces = text
        .split_inclusive(' ')
        .map(|piece| delta(&json!({ "content": piece })));
    Act::Stream(pieces.chain(finish("stop")).collect())
}

/// Wants these calls, their arguments cut into pieces and interleaved as providers do.
fn wants(calls: &[(&str, &str)]) -> Act {
    let mut events = vec![delta(&json!({ "role": "assistant", "content": null }))];
    for (index, (tool, _)) in calls.iter().enumerate() {
        let call = json!([{ "index": index, "id": format!("id{index}"), "type": "function", "function": { "name": tool, "arguments": "" } }]);
        events.push(delta(&json!({ "tool_calls": call })));
    }
    for half in 0..2 {
        for (index, (_, arguments)) in calls.iter().enumerate() {
            let (first, second) = arguments.split_at(arguments.len() / 2);
            let piece = if half == 0 { first } else { second };
            events.push(delta(
                &json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] }),
            ));
        }
    }
    events.extend(finish("tool_calls"));
    Act::Stream(events)
}

#[tokio::test]
async fn text_streams_and_usage_is_told() {
    let thinking = delta(&json!({ "reasoning_content": "hmm" }));
    let Act::Stream(mut events) = says("hello there friend") else {
        unreachable!()
    };
    events.insert(0, thinking);
    let provider = Provider::start(vec![Act::Stream(events)]).await;
    let mut agent = Agent::start(&provider.config("vllm/org/model-1"), Kept::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "hi").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.said(), "hello there friend");
    assert!(agent.of_kind("agent_message_chunk").len() >= 3, "it streams");
    assert_eq!(agent.thought(), "hmm");
    assert_eq!(answer["result"]["_meta"]["usage"]["inputTokens"], 11);
    assert_eq!(answer["result"]["_meta"]["usage"]["totalTokens"], 14);
    assert_eq!(agent.of_kind("usage_update")[0]["used"], 14);
    let (path, _, body) = provider.asked.lock().unwrap()[0].clone();
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
    let provider = Provider::start(vec![
        wants(&[
            ("meet", "{}"),
            ("meet", "{}"),
            ("odd_name_x", "{\"text\":\"héllo\"}"),
            ("fail", "{}"),
            ("echo", "{\"text\":"),
        ]),
        says("done"),
    ])
    .await;
    let kept = Kept::default();
    let mut agent = Agent::start(&provider.config("openai/gpt-4o"), kept.clone());
    let session = agent.open(json!([server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.said(), "done");
    let calls: Vec<&str> = agent
        .of_kind("tool_call")
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
    let kinds: Vec<Value> = kept.entries().iter().map(|e| e["kind"].clone()).collect();
    assert_eq!(kinds, ["user", "assistant", "results", "assistant"]);
}

#[tokio::test]
async fn a_loaded_session_goes_on_where_it_was() {
    let provider = Provider::start(vec![says("first answer"), says("second answer")]).await;
    let kept = Kept::default();
    let mut first = Agent::start(&provider.config("ollama/qwen"), kept.clone());
    let session = first.open(json!([])).await;
    first.prompt(&session, "first question").await;
    first.child.kill().await.unwrap();

    let mut second = Agent::start(&provider.config("ollama/qwen"), kept);
    second.load(&session, json!([])).await;
    second.prompt(&session, "second question").await;
    assert_eq!(second.said(), "second answer");
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
async fn anthropic_is_asked_its_own_way() {
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
    let provider = Provider::start(vec![Act::Stream(wanted), Act::Stream(done)]).await;
    let mut agent = Agent::start(&provider.config("anthropic/claude-sonnet-4-5"), Kept::default());
    let session = agent.open(json!([server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;

    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.said(), "Looking. Found.");
    assert_eq!(agent.thought(), "which tool?");
    assert_eq!(
        agent
            .of_kind("tool_call_update")
            .iter()
            .filter(|u| u["status"] == "completed")
            .count(),
        2
    );
    let (path, headers, body) = provider.asked.lock().unwrap()[1].clone();
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
async fn gemini_is_asked_its_own_way() {
    let dir = tempfile::tempdir().unwrap();
    let piece = |parts: Value, end: Value| {
        data(
            &json!({ "candidates": [{ "content": { "role": "model", "parts": parts }, "finishReason": end }], "usageMetadata": { "promptTokenCount": 5, "candidatesTokenCount": 2, "totalTokenCount": 7 } }),
        )
    };
    let call = json!([{ "functionCall": { "name": "echo", "args": { "text": "from gemini" } }, "thoughtSignature": "signed-by-gemini" }]);
    let provider = Provider::start(vec![
        Act::Stream(vec![piece(call, json!("STOP"))]),
        Act::Stream(vec![piece(json!([{ "text": "fine" }]), json!("STOP"))]),
    ])
    .await;
    let mut agent = Agent::start(&provider.config("gemini/gemini-3-pro"), Kept::default());
    let session = agent.open(json!([server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.said(), "fine");
    let (path, _, body) = provider.asked.lock().unwrap()[1].clone();
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
async fn cancel_stops_a_stream_at_once_and_what_was_said_is_remembered() {
    let hello = delta(&json!({ "content": "I was about to" }));
    let provider = Provider::start(vec![Act::StreamThenHang(vec![hello]), says("next")]).await;
    let kept = Kept::default();
    let mut agent = Agent::start(&provider.config("x/y"), kept.clone());
    let session = agent.open(json!([])).await;
    let prompt = agent.start_prompt(&session, "go").await;
    agent.until_update("agent_message_chunk").await;
    agent
        .notify("session/cancel", json!({ "sessionId": session }))
        .await;
    let answer = agent.answer(prompt).await;
    assert_eq!(answer["result"]["stopReason"], "cancelled");
    assert_eq!(kept.entries()[1]["text"], "I was about to");
    agent.prompt(&session, "and?").await;
    assert_eq!(agent.said(), "next");
}

#[tokio::test]
async fn cancel_during_a_call_leaves_a_whole_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let notes = dir.path().join("notes");
    let provider = Provider::start(vec![wants(&[("wait", "{}")]), says("next")]).await;
    let mut agent = Agent::start(&provider.config("x/y"), Kept::default());
    let session = agent.open(json!([server(&notes)])).await;
    let prompt = agent.start_prompt(&session, "go").await;
    agent.until_update("tool_call").await;
    noted(&notes, "call wait").await;
    agent
        .notify("session/cancel", json!({ "sessionId": session }))
        .await;
    assert_eq!(agent.answer(prompt).await["result"]["stopReason"], "cancelled");
    noted(&notes, "cancelled wait").await;
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
async fn trouble_is_retried_and_then_told() {
    let busy = || Act::Fail(503, json!({ "error": { "message": "overloaded" } }));
    let provider = Provider::start(vec![
        Act::Fail(429, json!({})),
        busy(),
        Act::Stream(vec![]),
        says("at last"),
    ])
    .await;
    let mut agent = Agent::start(&provider.config("x/y"), Kept::default());
    let session = agent.open(json!([])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    assert_eq!(agent.said(), "at last");
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

    provider
        .acts
        .lock()
        .unwrap()
        .push_back(Act::Fail(401, json!({ "error": { "message": "wrong key" } })));
    let answer = agent.prompt(&session, "once more").await;
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("401: wrong key"),
        "{answer}"
    );
    assert_eq!(provider.count(), 10, "a refusal is not retried");
    provider.acts.lock().unwrap().push_back(says("well again"));
    assert_eq!(
        agent.prompt(&session, "now?").await["result"]["stopReason"],
        "end_turn"
    );
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_not_shown_twice() {
    let error = data(&json!({ "error": { "message": "upstream fell over" } }));
    let provider = Provider::start(vec![Act::Stream(vec![
        delta(&json!({ "content": "half" })),
        error,
    ])])
    .await;
    let mut agent = Agent::start(&provider.config("x/y"), Kept::default());
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
    assert_eq!(agent.said(), "half");
}

#[tokio::test]
async fn rounds_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start((0..9).map(|_| wants(&[("echo", "{}")])).collect()).await;
    let mut config = provider.config("x/y");
    config["max_iterations"] = json!(3);
    let mut agent = Agent::start(&config, Kept::default());
    let session = agent.open(json!([server(&dir.path().join("notes"))])).await;
    let answer = agent.prompt(&session, "go").await;
    assert_eq!(answer["result"]["stopReason"], "max_turn_requests", "{answer}");
    assert_eq!(provider.count(), 3);
    assert_eq!(answer["result"]["_meta"]["usage"]["requests"], 3);
}

#[tokio::test]
async fn a_list_that_changes_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(vec![
        wants(&[("grow", "{}")]),
        wants(&[("grown", "{\"text\":\"new\"}")]),
        says("ok"),
    ])
    .await;
    let mut agent = Agent::start(&provider.config("x/y"), Kept::default());
    let session = agent.open(json!([server(&dir.path().join("notes"))])).await;
    agent.prompt(&session, "go").await;
    let names = |request| provider.body(request)["tools"].to_string();
    assert!(!names(0).contains("grown"));
    assert!(names(1).contains("\"grown\""), "{}", names(1));
}

#[tokio::test]
async fn a_conversation_too_long_is_shortened() {
    let long = "x".repeat(3000);
    let too_long = Act::Fail(
        400,
        json!({ "error": { "message": "maximum context length is 10 tokens" } }),
    );
    let provider = Provider::start(vec![
        says(&long),
        says(&long),
        says("three"),
        too_long,
        says("four"),
    ])
    .await;
    let kept = Kept::default();
    let mut config = provider.config("x/y");
    config["context_chars"] = json!(5000);
    let mut agent = Agent::start(&config, kept.clone());
    let session = agent.open(json!([])).await;
    for prompt in ["one", "two", "three", "four"] {
        let answer = agent.prompt(&session, prompt).await;
        assert_eq!(answer["result"]["stopReason"], "end_turn", "{answer}");
    }
    assert!(
        provider.body(2)["messages"].to_string().len() < 5000,
        "cut before it was sent"
    );
    assert_eq!(agent.said(), "four", "and again when the provider asked for it");
    assert!(kept.entries()[0]["kind"] == "forgotten", "{:?}", kept.entries());
    assert!(json!(kept.entries()).to_string().len() < 5000);
}

#[tokio::test]
async fn no_forwarder_is_told_as_such() {
    let config = json!({ "prompt": "", "model": "x/y", "base_url": "http://127.0.0.1:1", "retry_ms": 1 });
    let mut agent = Agent::start(&config, Kept::default());
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
