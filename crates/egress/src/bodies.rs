//! The bodies of a forwarded request: the request's with a size limit; the response's with a size
//! limit and a deadline, reported when it ends.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{sync::OwnedSemaphorePermit, time::Sleep};

use crate::{
    refusal::BoxError,
    request_report::RequestReport,
    usage::{AnswerState, RequestReader},
};

/// A request's body that fails beyond a size limit.
pub(crate) struct LimitedRequestBody {
    inner: Incoming,
    remaining: u64,
    too_large: Arc<AtomicBool>,
    reader: Option<Arc<RequestReader>>,
}

impl LimitedRequestBody {
    /// What passes is shown to `reader`. The returned flag is set if the limit was exceeded: the HTTP client's error does
    /// not tell.
    pub(crate) fn new(
        inner: Incoming,
        most: u64,
        reader: Option<Arc<RequestReader>>,
    ) -> (Self, Arc<AtomicBool>) {
        let too_large = Arc::new(AtomicBool::new(false));
        (
            Self {
                inner,
                remaining: most,
                too_large: too_large.clone(),
                reader,
            },
            too_large,
        )
    }
}

impl Body for LimitedRequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            None => return Poll::Ready(None),
        };
        let size = frame.data_ref().map_or(0, |data| data.len() as u64);
        match self.remaining.checked_sub(size) {
            Some(left) => self.remaining = left,
            None => {
                self.too_large.store(true, Ordering::Release);
                return Poll::Ready(Some(Err("the request is too large".into())));
            }
        }
        if let (Some(reader), Some(data)) = (&self.reader, frame.data_ref()) {
            reader.feed(data);
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A provider's response on its way into the sandbox. An exceeded limit is an error that breaks the
/// connection off, so that a truncated response does not look complete.
pub(crate) struct ProviderResponseBody {
    inner: BoxStream<'static, reqwest::Result<Bytes>>,
    remaining: u64,
    deadline: Pin<Box<Sleep>>,
    /// Released before the request is reported: what receives the report may make the next request.
    permit: Option<OwnedSemaphorePermit>,
    report: RequestReport,
}

impl ProviderResponseBody {
    pub(crate) fn new(
        response: reqwest::Response,
        most: u64,
        deadline: tokio::time::Instant,
        permit: OwnedSemaphorePermit,
        report: RequestReport,
    ) -> Self {
        Self {
            inner: response.bytes_stream().boxed(),
            remaining: most,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            permit: Some(permit),
            report,
        }
    }

    /// The answer has been read to its end.
    fn end(&mut self) {
        self.permit = None;
        self.report.end();
    }
}

impl Stream for ProviderResponseBody {
    type Item = Result<Frame<Bytes>, BoxError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the request took too long".into())));
        }
        match ready!(self.inner.poll_next_unpin(cx)) {
            None => {
                self.end();
                Poll::Ready(None)
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error.without_url().into()))),
            Some(Ok(data)) => match self.remaining.checked_sub(data.len() as u64) {
                Some(left) => {
                    self.remaining = left;
                    if self.report.observe(&data) == AnswerState::Finished {
                        self.end();
                    }
                    Poll::Ready(Some(Ok(Frame::data(data))))
                }
                None => Poll::Ready(Some(Err("the response is too large".into()))),
            },
        }
    }
}
