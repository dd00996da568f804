//! The fuzz target of a tool server's messages.

use std::sync::Arc;

use bytes::Bytes;
use oubliette_protocol::ByteBudget;

use super::{
    envelope, limits, listing,
    traffic::{CallReply, TrafficFilter},
};
use crate::call::RawCallResult;

/// Direct calls that are open while the messages come. Their ids are those the filter gives, in order.
const OPEN_CALLS: usize = 4;

/// Feeds arbitrary bytes through the filter of a server's messages, one message a line, and reads what calls and the
/// tool list make of them. Panics only when an invariant is broken.
#[doc(hidden)]
pub fn fuzz_messages(bytes: &[u8]) {
    let Ok(server) = "server".parse() else { return };
    let traffic = TrafficFilter::new(server, Arc::default(), ByteBudget::default());
    let mut calls: Vec<_> = (0..OPEN_CALLS).map(|_| traffic.register_call(None)).collect();
    for line in bytes.split(|byte| *byte == b'\n') {
        let text = Bytes::copy_from_slice(line);
        let before = traffic.pending_count();
        traffic.intercept_http_response(&text);
        traffic.handle_incoming(&text);
        assert!(
            before - traffic.pending_count() <= 1,
            "one message answers one call"
        );
        fuzz_page(line);
    }
    for (_, reply) in &mut calls {
        if let Ok(CallReply::Result(Ok(result))) = reply.try_recv() {
            fuzz_result(&result.text);
        }
    }
}

/// A result that is passed on as text is the same when it is parsed.
fn fuzz_result(text: &[u8]) {
    let Some(raw) = RawCallResult::validate(text) else {
        let _ = envelope::read_result(text);
        return;
    };
    let read = envelope::read_result(text);
    assert_eq!(read.as_ref(), Ok(&raw.parse()), "text and result differ");
    assert_eq!(raw.is_error(), raw.parse().is_error);
}

/// Every tool that is kept of a list is within its bounds.
fn fuzz_page(text: &[u8]) {
    for tool in listing::parse_page(text).unwrap_or_default() {
        assert!(!tool.name.is_empty() && !tool.name.chars().any(char::is_control));
        assert!(tool.description.len() <= limits::MAX_DESCRIPTION_BYTES);
        assert_eq!(
            tool.input_schema["type"], "object",
            "a schema that takes no arguments"
        );
    }
}
