use super::*;
use proptest::prelude::*;
use serde_json::json;

fn refused(line: &str) -> (Option<RpcId>, i64) {
    let refused = parse_line(line.as_bytes()).unwrap_err();
    (refused.id, refused.error.code)
}

#[test]
fn what_is_not_json_is_a_parse_error() {
    for bad in [
        "{",
        "nonsense",
        r#"{"jsonrpc":"2.0","method":"x""#,
        r#"[1,2"#,
        r#"{"id":1,"id":2,"#,
        "\u{1}",
    ] {
        assert_eq!(refused(bad), (None, PARSE_ERROR), "{bad}");
    }
    assert_eq!(parse_line(b"\"\xff\"").unwrap_err().error.code, PARSE_ERROR);
}

#[test]
fn json_that_is_no_request_is_an_invalid_request() {
    for bad in [
        "1",
        "null",
        r#""text""#,
        "[]",
        r#"[{"jsonrpc":"2.0","id":1,"method":"x"}]"#,
        "{}",
        r#"{"jsonrpc":"2.0","id":null,"method":"x"}"#,
        r#"{"jsonrpc":"2.0","id":[1],"method":"x"}"#,
        r#"{"jsonrpc":"2.0","id":true,"method":"x"}"#,
        r#"{"jsonrpc":"2.0","id":{},"method":"x"}"#,
        r#"{"jsonrpc":"2.0","method":"x","method":"y"}"#,
    ] {
        assert_eq!(refused(bad), (None, INVALID_REQUEST), "{bad}");
    }
    for bad in [
        r#"{"id":7}"#,
        r#"{"id":7,"method":"x"}"#,
        r#"{"jsonrpc":"1.0","id":7,"method":"x"}"#,
        r#"{"jsonrpc":"2.0","id":7,"method":null}"#,
    ] {
        assert_eq!(refused(bad), (Some(7.into()), INVALID_REQUEST), "{bad}");
    }
    let long = format!(
        r#"{{"jsonrpc":"2.0","id":"{}","method":"x"}}"#,
        "i".repeat(MAX_ID_BYTES)
    );
    assert_eq!(refused(&long), (None, INVALID_REQUEST));
}

#[test]
fn params_nested_too_deeply_name_their_request() {
    let deep = format!(
        r#"{{"jsonrpc":"2.0","id":7,"method":"x","params":{}{}}}"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert_eq!(refused(&deep), (Some(7.into()), INVALID_PARAMS));
}

#[test]
fn a_response_is_never_refused_however_odd() {
    for odd in [
        r#"{"id":null,"error":{"code":-32700,"message":"?"}}"#,
        r#"{"error":7}"#,
        r#"{"id":{},"result":1}"#,
        r#"{"id":1,"result":1,"error":{}}"#,
    ] {
        assert!(
            matches!(parse_line(odd.as_bytes()), Ok(RpcMessage::Response { .. })),
            "{odd}"
        );
    }
    let both = parse_line(br#"{"id":1,"result":{"a":1},"error":null}"#).unwrap();
    assert_eq!(
        both,
        RpcMessage::Response {
            id: Some(1.into()),
            outcome: Ok(json!({"a":1}))
        }
    );
    let null = parse_line(br#"{"jsonrpc":"2.0","id":1,"result":null}"#).unwrap();
    assert_eq!(
        null,
        RpcMessage::Response {
            id: Some(1.into()),
            outcome: Ok(Value::Null)
        }
    );
}

#[test]
fn a_line_longer_than_the_limit_is_not_made() {
    let message = RpcMessage::Notification {
        method: "x".into(),
        params: json!({"a": "b".repeat(100)}),
    };
    assert_eq!(message.to_line(100), Err(CallError::MessageTooLong(100)));
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map(".{0,6}", inner, 0..6)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

fn id() -> impl Strategy<Value = RpcId> {
    prop_oneof![
        any::<i64>().prop_map(|n| RpcId::Number(n.into())),
        any::<u64>().prop_map(RpcId::from),
        ".{0,20}".prop_map(|t| RpcId::Text(t.into())),
    ]
}

fn message() -> impl Strategy<Value = RpcMessage> {
    prop_oneof![
        (id(), ".{0,20}", json_value()).prop_map(|(id, method, params)| RpcMessage::Request {
            id,
            method,
            params
        }),
        (".{0,20}", json_value()).prop_map(|(method, params)| RpcMessage::Notification { method, params }),
        (prop::option::of(id()), json_value()).prop_map(|(id, value)| RpcMessage::Response {
            id,
            outcome: Ok(value)
        }),
        (
            prop::option::of(id()),
            any::<i64>(),
            ".{0,20}",
            prop::option::of(json_value())
        )
            .prop_map(|(id, code, message, data)| {
                let data = data.filter(|d| !d.is_null());
                let error = RpcError { code, message, data };
                RpcMessage::Response {
                    id,
                    outcome: Err(AnswerError::Remote(error)),
                }
            }),
    ]
}

proptest! {
    #[test]
    fn any_message_survives_the_wire(message in message()) {
        let line = message.to_line(usize::MAX).unwrap();
        prop_assert_eq!(line.iter().position(|b| *b == b'\n'), Some(line.len() - 1));
        prop_assert_eq!(parse_line(&line[..line.len() - 1]), Ok(message));
    }

    #[test]
    fn no_bytes_break_the_parser(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        crate::fuzz_line(&bytes);
    }

    #[test]
    fn no_near_miss_breaks_the_parser(message in message(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut line = message.to_line(usize::MAX).unwrap();
        let at = at.index(line.len());
        line[at] = byte;
        crate::fuzz_line(&line);
    }
}
