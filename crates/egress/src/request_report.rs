//! The record of each model request, given to the session when the request is over.

use std::{mem, sync::Arc, time::Duration};

use async_trait::async_trait;
use http::HeaderMap;
use jiff::Timestamp;
use oubliette_protocol::{Error, Result, usage::RequestUsage};
use tokio::time::Instant;

use crate::usage::{AnswerReader, AnswerState, ModelApi, RequestReader};

/// One model request that is over.
#[derive(Debug, Clone)]
pub struct ModelRequest {
    /// The provider's name; empty if the request named none.
    pub provider: String,
    /// The path without provider and query.
    pub path: String,
    /// The status that the sandbox got; 0 if it did not wait for one.
    pub status: u16,
    /// When it began.
    pub started: Timestamp,
    /// How long it took.
    pub duration: Duration,
    /// Whether [`ModelSink::admit`] was asked and let it pass.
    pub admitted: bool,
    /// What it used, without its cost. `None` if it asked no model for an answer, or was refused.
    pub usage: Option<RequestUsage>,
}

/// Decides about the model requests of one session and receives their records. Never given a secret.
#[async_trait]
pub trait ModelSink: Send + Sync {
    /// Asked before a request for a model's answer is passed on. `limit_exceeded` refuses it in the form of the
    /// provider's own API, as a used up quota; any other error as unavailable.
    async fn admit(&self) -> Result<()> {
        Ok(())
    }

    /// Counts a request that was refused and would be refused again. Returns how many there were in this turn since a model
    /// last answered, this one included: from the second on the client is answered so that it does not ask again.
    async fn count_refused(&self, _error: &Error) -> u32 {
        1
    }

    /// A request is over. For an answer with an end mark this is before the mark is passed on, so that what the request
    /// used is known before its client can know that it is over.
    fn model_request(&self, request: ModelRequest);
}

/// Reports a request to the sink, once: at the end of its answer, or when dropped because either side broke off.
pub(crate) struct RequestReport {
    sink: Arc<dyn ModelSink>,
    /// Taken when it is reported.
    request: Option<ModelRequest>,
    since: Instant,
    usage: UsageSource,
}

/// What is known of a request's usage.
enum UsageSource {
    /// It asks no model, or was not passed on.
    None,
    /// It was passed on, and not answered yet.
    Unanswered(ModelApi, Arc<RequestReader>),
    /// It was answered with an error.
    Failed(Arc<RequestReader>),
    Answered(Box<AnswerReader>),
}

impl RequestReport {
    pub(crate) fn begin(sink: Arc<dyn ModelSink>, path: String) -> Self {
        Self {
            sink,
            request: Some(ModelRequest {
                provider: String::new(),
                path,
                status: 0,
                started: oubliette_protocol::now(),
                duration: Duration::ZERO,
                admitted: false,
                usage: None,
            }),
            since: Instant::now(),
            usage: UsageSource::None,
        }
    }

    /// When the request began.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    pub(crate) fn set_target(&mut self, provider: String, path: String) {
        if let Some(request) = &mut self.request {
            (request.provider, request.path) = (provider, path);
        }
    }

    /// Asks whether a model may be asked.
    pub(crate) async fn admit(&mut self) -> Result<()> {
        self.sink.admit().await?;
        if let Some(request) = &mut self.request {
            request.admitted = true;
        }
        Ok(())
    }

    /// Notes that the request is passed on now.
    pub(crate) fn passed_on(&mut self, api: ModelApi, request: Arc<RequestReader>) {
        self.usage = UsageSource::Unanswered(api, request);
    }

    /// Notes that the request was refused here with this status. It used nothing, unless the provider had it and only
    /// took too long.
    pub(crate) fn refused(&mut self, status: http::StatusCode) {
        self.set_status(status.as_u16());
        if status != http::StatusCode::GATEWAY_TIMEOUT {
            self.usage = UsageSource::None;
        }
    }

    /// Notes the head of the provider's answer.
    pub(crate) fn answered(&mut self, status: http::StatusCode, headers: &HeaderMap) {
        self.set_status(status.as_u16());
        self.usage = match mem::replace(&mut self.usage, UsageSource::None) {
            UsageSource::Unanswered(api, request) if status.is_success() => {
                UsageSource::Answered(Box::new(AnswerReader::new(api, request, headers)))
            }
            UsageSource::Unanswered(_, request) => UsageSource::Failed(request),
            other => other,
        };
    }

    /// Reads a piece of the answer that is about to be passed on. Returns whether the answer is finished with it and
    /// [`end`](Self::end) is to be called.
    pub(crate) fn observe(&mut self, chunk: &[u8]) -> AnswerState {
        match &mut self.usage {
            UsageSource::Answered(reader) if self.request.is_some() => reader.feed(chunk),
            _ => AnswerState::Open,
        }
    }

    /// Notes that the answer has ended.
    pub(crate) fn end(&mut self) {
        if let UsageSource::Answered(reader) = &mut self.usage {
            reader.end();
        }
        self.send();
    }

    fn set_status(&mut self, status: u16) {
        if let Some(request) = &mut self.request {
            request.status = status;
        }
    }

    fn send(&mut self) {
        let Some(mut request) = self.request.take() else {
            return;
        };
        request.duration = self.since.elapsed();
        request.usage = match &self.usage {
            UsageSource::None | UsageSource::Unanswered(ModelApi::Other, _) => None,
            UsageSource::Unanswered(_, read) => Some(read.usage_without_answer()),
            UsageSource::Failed(read) => Some(read.usage_of_error()),
            UsageSource::Answered(reader) => reader.usage(),
        };
        self.sink.model_request(request);
    }
}

impl Drop for RequestReport {
    fn drop(&mut self) {
        self.send();
    }
}
