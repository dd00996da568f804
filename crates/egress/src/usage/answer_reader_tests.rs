//! Answers of all four APIs, whole, streamed, silent and cut.

use http::HeaderValue;
use serde_json::json;

use super::*;

const EVENTS: &str = "text/event-stream; charset=utf-8";
const JSON: &str = "application/json";

fn reader(api: ModelApi, content_type: &'static str) -> AnswerReader {
    let request = Arc::new(RequestReader::new(None));
    // 40 bytes: an estimate of 10 tokens.
    request.feed(br#"{"messages":"twelve chars","model":"m1"}"#);
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    AnswerReader::new(api, request, &headers)
}

/// Feeds the text byte by byte; returns where it was finished, and what it used.
fn read(api: ModelApi, content_type: &'static str, text: &str) -> (Option<usize>, RequestUsage) {
    let mut reader = reader(api, content_type);
    let mut finished = None;
    for (at, byte) in text.bytes().enumerate() {
        if reader.feed(&[byte]) == AnswerState::Finished && finished.is_none() {
            finished = Some(at + 1);
        }
    }
    (finished, reader.usage().unwrap())
}

fn usage(input: u64, output: u64, cached: u64, estimated: bool) -> RequestUsage {
    RequestUsage {
        model: "m1".into(),
        input_tokens: input,
        output_tokens: output,
        cached_tokens: cached,
        cost_usd: None,
        estimated,
    }
}

fn stream(events: &[serde_json::Value]) -> String {
    events.iter().map(|event| format!("data: {event}\n\n")).collect()
}

#[test]
fn whole_answers_of_every_api_say_what_they_used() {
    let chat = json!({"model": "m1-2026", "choices": [{"message": {"content": "hi"}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}});
    let responses = json!({"model": "m1", "output": [{"content": [{"text": "hi"}]}],
        "usage": {"input_tokens": 7, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 3}}});
    let messages = json!({"model": "m1", "content": [{"type": "text", "text": "hi"}],
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1, "output_tokens": 5}});
    let gemini = json!({"modelVersion": "m1", "candidates": [{"content": {"parts": [{"text": "hi"}]}}],
        "usageMetadata": {"promptTokenCount": 7, "cachedContentTokenCount": 3, "candidatesTokenCount": 4, "thoughtsTokenCount": 1}});
    for (api, answer) in [
        (ModelApi::Chat, chat),
        (ModelApi::Responses, responses),
        (ModelApi::Messages, messages),
        (ModelApi::Gemini, gemini),
    ] {
        let text = answer.to_string();
        assert_eq!(
            read(api, JSON, &text),
            (Some(text.len()), usage(7, 5, 3, false)),
            "{api:?}"
        );
    }
}

#[test]
fn streamed_answers_are_finished_at_their_last_event() {
    let chat = stream(&[
        json!({"choices": [{"delta": {"content": "hi"}}], "usage": null}),
        json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}),
    ]) + "data: [DONE]\n\n";
    let responses = stream(&[
        json!({"type": "response.created", "response": {"model": "m1", "usage": null}}),
        json!({"type": "response.output_text.delta", "delta": "hi"}),
        json!({"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 5}}}),
    ]);
    let messages = stream(&[
        json!({"type": "message_start", "message": {"model": "m1", "usage": {"input_tokens": 7, "output_tokens": 1}}}),
        json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}),
        json!({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}}),
        json!({"type": "message_stop"}),
    ]);
    for (api, text) in [
        (ModelApi::Chat, chat),
        (ModelApi::Responses, responses),
        (ModelApi::Messages, messages),
    ] {
        assert_eq!(
            read(api, EVENTS, &text),
            (Some(text.len()), usage(7, 5, 0, false)),
            "{api:?}"
        );
    }
    let last = stream(&[json!({"candidates": [{"content": {}, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 5}})]);
    assert_eq!(
        read(ModelApi::Gemini, EVENTS, &last),
        (Some(last.len()), usage(7, 5, 0, false))
    );
    // A reason without counts does not finish it: they may follow.
    let chunk = |output: u64| {
        json!({"candidates": [{"content": {"parts": [{"text": "hi"}]}}],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": output}})
    };
    let reason = json!({"candidates": [{"finishReason": "STOP"}]});
    let mut gemini = reader(ModelApi::Gemini, EVENTS);
    assert_eq!(
        gemini.feed(stream(&[chunk(2), reason, chunk(5)]).as_bytes()),
        AnswerState::Open
    );
    gemini.end();
    assert_eq!(gemini.usage().unwrap(), usage(7, 5, 0, false));
    // A prompt that was not answered at all.
    let mut blocked = reader(ModelApi::Gemini, EVENTS);
    let refusal = json!({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 7, "totalTokenCount": 7}});
    assert_eq!(blocked.feed(stream(&[refusal]).as_bytes()), AnswerState::Finished);
    assert_eq!(blocked.usage().unwrap(), usage(7, 0, 0, false));
    let array = json!([chunk(2), chunk(5)]).to_string();
    assert_eq!(
        read(ModelApi::Gemini, JSON, &array),
        (Some(array.len()), usage(7, 5, 0, false))
    );
}

#[test]
fn an_answer_that_says_nothing_is_estimated() {
    let silent = stream(&[
        json!({"choices": [{"delta": {"content": "eight ch"}}]}),
        json!({"choices": [{"delta": {"content": "ars more"}}]}),
    ]) + "data: [DONE]\n\n";
    assert_eq!(read(ModelApi::Chat, EVENTS, &silent).1, usage(10, 4, 0, true));
    let odd =
        json!({"content": [{"text": "eight ch"}], "usage": {"input_tokens": -1, "output_tokens": "many"}});
    assert_eq!(
        read(ModelApi::Messages, JSON, &odd.to_string()).1,
        usage(10, 2, 0, true)
    );
    assert_eq!(
        read(ModelApi::Chat, JSON, "not JSON at all").1,
        usage(10, 0, 0, true)
    );
    // Of a path that is no known API nothing is counted unless it says so.
    let mut other = reader(ModelApi::Other, JSON);
    other.feed(b"{\"data\":[]}");
    assert_eq!(other.usage(), None);
}

#[test]
fn a_stream_that_is_cut_counts_what_came() {
    let begun = stream(&[
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}),
        json!({"type": "content_block_delta", "delta": {"text": "forty characters of text are ten tokens."}}),
    ]);
    assert_eq!(
        read(ModelApi::Messages, EVENTS, &begun),
        (None, usage(7, 10, 0, true))
    );
    // Without an error: the connection was closed as if that were all.
    let mut closed = reader(ModelApi::Messages, EVENTS);
    closed.feed(begun.as_bytes());
    closed.end();
    assert_eq!(closed.usage().unwrap(), usage(7, 10, 0, true));
    let cut = stream(&[
        json!({"candidates": [{"content": {"parts": [{"text": "eight ch"}]}}],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 1}}),
    ]);
    assert_eq!(read(ModelApi::Gemini, EVENTS, &cut), (None, usage(7, 2, 0, true)));
    let array = json!([{"candidates": [{"content": {"parts": [{"text": "eight ch"}]}}],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 1}}]);
    let array = array.to_string();
    for (kind, text) in [(EVENTS, cut.as_str()), (JSON, array.trim_end_matches(']'))] {
        let mut closed = reader(ModelApi::Gemini, kind);
        closed.feed(text.as_bytes());
        closed.end();
        assert_eq!(closed.usage().unwrap(), usage(7, 2, 0, true), "{kind}");
    }
    // Its usage has come, only the mark after it has not.
    let told = stream(&[json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})]);
    assert_eq!(read(ModelApi::Chat, EVENTS, &told), (None, usage(7, 5, 0, false)));
    assert_eq!(
        read(
            ModelApi::Chat,
            EVENTS,
            "data: {\"choices\":[{\"delta\":{\"content\":\"12345"
        )
        .1,
        usage(10, 2, 0, true)
    );
}

#[test]
fn an_answer_that_is_compressed_all_the_same_is_estimated_by_its_length() {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    let request = Arc::new(RequestReader::new(Some("in-path")));
    let mut reader = AnswerReader::new(ModelApi::Chat, request, &headers);
    reader.feed(&[0x1f; 40]);
    reader.end();
    let usage = reader.usage().unwrap();
    assert_eq!(
        (usage.model.as_str(), usage.output_tokens, usage.estimated),
        ("in-path", 10, true)
    );
}
