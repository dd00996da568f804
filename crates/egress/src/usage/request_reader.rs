//! The model a request names, and how long the request is, read as its body passes.

use std::sync::Mutex;

use super::{bounded_model_name, estimate_tokens, field_scanner::FieldScanner};

/// What is known of a request. Shared by the body, which is read by the HTTP client, and the request's report.
#[derive(Debug)]
pub(crate) struct RequestReader(Mutex<ReadRequest>);

#[derive(Debug)]
struct ReadRequest {
    scanner: FieldScanner,
    bytes: u64,
    model_in_path: Option<String>,
}

impl RequestReader {
    pub(crate) fn new(model_in_path: Option<&str>) -> Self {
        Self(Mutex::new(ReadRequest {
            scanner: FieldScanner::of_request(),
            bytes: 0,
            model_in_path: model_in_path.map(bounded_model_name),
        }))
    }

    pub(crate) fn feed(&self, bytes: &[u8]) {
        let mut read = self.lock();
        read.bytes += bytes.len() as u64;
        read.scanner.feed(bytes);
    }

    /// The model that the request names; `None` if it cannot be told, because a part of the request was not looked at.
    pub(super) fn model(&self) -> Option<String> {
        let read = self.lock();
        let found = read.scanner.found().model.as_deref();
        let in_body = found
            .filter(|_| !read.scanner.has_given_up())
            .map(bounded_model_name);
        read.model_in_path.clone().or(in_body)
    }

    /// About how many tokens the request has.
    pub(super) fn estimated_tokens(&self) -> u64 {
        estimate_tokens(self.lock().bytes)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ReadRequest> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
