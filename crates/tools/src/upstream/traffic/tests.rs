use tokio::time::Instant;

use super::*;
use crate::upstream::{envelope::read_result, limits};
use rmcp::model::{CallToolRequest, CallToolRequestParams, ClientRequest};
use serde_json::json;

fn traffic() -> Arc<TrafficFilter> {
    TrafficFilter::new("t".parse().unwrap(), Arc::default(), ByteBudget::default())
}

fn call(traffic: &TrafficFilter, id: i64) -> ResultSlot {
    let answer = ResultSlot::default();
    let mut request = CallToolRequest::new(CallToolRequestParams::new("x"));
    request.extensions.insert(RequestAttachment {
        result_slot: answer.clone(),
        progress: None,
        http_visibility: HttpResultVisibility::Hidden,
    });
    let request = ClientRequest::CallToolRequest(request);
    traffic.register_outgoing(&ClientJsonRpcMessage::request(
        request,
        NumberOrString::Number(id),
    ));
    answer
}

#[test]
fn a_result_is_kept_byte_for_byte() {
    let traffic = traffic();
    let content = json!([
        {"type":"image","data":"aGk=","mimeType":"image/png","unknownField":[1]},
        {"type":"from_the_future","x":1},
    ]);
    for (id, sent) in [(7, json!(7)), (8, json!("8"))] {
        let answer = call(&traffic, id);
        let text = json!({"jsonrpc":"2.0","id":sent,"result":{
            "content":content,"structuredContent":{"z":1,"a":2},"isError":true,"_meta":{}}});
        let seen = traffic.handle_incoming(&Bytes::from(text.to_string())).unwrap();
        assert!(matches!(seen, ServerJsonRpcMessage::Response(r) if r.id == NumberOrString::Number(id)));
        let received = answer.lock().take().unwrap().unwrap();
        let result = read_result(&received.text).unwrap();
        assert_eq!(Value::from(result.content), content);
        assert_eq!(result.structured_content.unwrap().to_string(), r#"{"z":1,"a":2}"#);
        assert!(result.is_error);
    }
    assert!(traffic.pending.lock().is_empty());
}

#[test]
fn a_request_over_http_stays_pending_until_its_response_is_delivered() {
    let traffic = traffic();
    let answer = call(&traffic, 3);
    let text = Bytes::from_static(br#"{"jsonrpc":"2.0","id":3,"result":{"content":[]}}"#);
    let passed_on = traffic.intercept_http_response(&text).unwrap();
    assert!(answer.lock().is_some() && traffic.pending.lock().contains_key(&3));
    traffic.filter(passed_on, 0).unwrap();
    assert!(traffic.pending.lock().is_empty());
    assert_eq!(traffic.unsolicited.lock().messages, 0);
}

#[test]
fn a_late_response_to_a_cancelled_call_is_dropped_and_counted() {
    let traffic = traffic();
    let answer = call(&traffic, 1);
    let cancelled = json!({"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}});
    traffic.register_outgoing(&serde_json::from_value(cancelled).unwrap());
    traffic.handle_incoming(&Bytes::from_static(
        br#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#,
    ));
    assert!(answer.lock().is_none());
    assert_eq!(traffic.unsolicited.lock().messages, 1);
}

#[tokio::test(start_paused = true)]
async fn a_flood_is_throttled_until_the_window_is_over() {
    let traffic = traffic();
    for _ in 0..=limits::MAX_UNSOLICITED_MESSAGES {
        traffic.handle_incoming(&Bytes::from_static(b"noise"));
    }
    let before = Instant::now();
    traffic.throttle().await;
    assert!(before.elapsed() >= limits::UNSOLICITED_WINDOW / 2);
    traffic.throttle().await;
    traffic.handle_incoming(&Bytes::from(vec![b'x'; limits::MAX_UNSOLICITED_BYTES + 1]));
    assert!(traffic.unsolicited.lock().paused_until().is_some());
}
