//! The bodies of a request to a service: bounded, counted, and the answer's with the credential masked.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream::BoxStream};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep},
};

use crate::{
    form_method::MethodFieldSearch, proxy_client::EgressReport, refusal::BoxError,
    secret_masker::SecretMasker,
};

/// A request's body that counts its bytes and fails beyond a limit, and where it would change the request's method.
pub(crate) struct ServiceRequestBody {
    inner: Incoming,
    sent: Arc<AtomicU64>,
    most: u64,
    search: Option<MethodFieldSearch>,
    found: Arc<AtomicBool>,
}

impl ServiceRequestBody {
    /// `sent` counts the bytes; past `most` the body fails.
    pub(crate) fn new(inner: Incoming, sent: Arc<AtomicU64>, most: u64) -> Self {
        Self {
            inner,
            sent,
            most,
            search: None,
            found: Arc::default(),
        }
    }

    /// Fails before a form's field is sent that some servers take for the method, and sets `found`.
    pub(crate) fn refuse_method_field(mut self, search: MethodFieldSearch, found: Arc<AtomicBool>) -> Self {
        (self.search, self.found) = (Some(search), found);
        self
    }
}

impl Body for ServiceRequestBody {
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
        if let (Some(search), Some(data)) = (&mut self.search, frame.data_ref())
            && search.finds_in(data)
        {
            self.found.store(true, Ordering::Release);
            return Poll::Ready(Some(Err("the form has a field for another method".into())));
        }
        let size = frame.data_ref().map_or(0, |data| data.len() as u64);
        let total = self.sent.fetch_add(size, Ordering::AcqRel) + size;
        Poll::Ready(Some(match total > self.most {
            true => Err("the request is too large".into()),
            false => Ok(frame),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The report of a request to a service, made when dropped.
pub(crate) struct ServiceReport {
    pub(crate) report: EgressReport,
    /// Bytes of the request's body that were sent.
    pub(crate) sent: Arc<AtomicU64>,
}

impl ServiceReport {
    /// Sets the status that the sandbox gets.
    pub(crate) fn set_status(&mut self, status: http::StatusCode) {
        if let Some(request) = &mut self.report.record.request {
            request.status = status.as_u16();
        }
    }
}

impl Drop for ServiceReport {
    fn drop(&mut self) {
        self.report.record.bytes_out = self.sent.load(Ordering::Acquire);
    }
}

/// A service's answer on its way into the sandbox. An exceeded limit is an error that breaks the connection off, so that a
/// truncated answer does not look complete.
pub(crate) struct ServiceResponseBody {
    inner: BoxStream<'static, reqwest::Result<Bytes>>,
    masker: SecretMasker,
    ended: bool,
    most: u64,
    deadline: Pin<Box<Sleep>>,
    report: ServiceReport,
    _permit: OwnedSemaphorePermit,
}

impl ServiceResponseBody {
    pub(crate) fn new(
        response: reqwest::Response,
        masker: SecretMasker,
        most: u64,
        deadline: Instant,
        report: ServiceReport,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            inner: response.bytes_stream().boxed(),
            masker,
            ended: false,
            most,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            report,
            _permit: permit,
        }
    }

    fn fail(&mut self, why: &str) -> BoxError {
        self.report.report.record.error = Some(why.to_owned());
        why.into()
    }
}

impl Stream for ServiceResponseBody {
    type Item = Result<Frame<Bytes>, BoxError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(self.fail("the request took too long"))));
        }
        loop {
            let masked = match ready!(self.inner.poll_next_unpin(cx)) {
                None => {
                    self.ended = true;
                    self.masker.finish()
                }
                Some(Err(error)) => {
                    let why = format!("the answer broke off: {}", error.without_url());
                    return Poll::Ready(Some(Err(self.fail(&why))));
                }
                Some(Ok(data)) => {
                    let record = &mut self.report.report.record;
                    record.bytes_in += data.len() as u64;
                    if record.bytes_in > self.most {
                        return Poll::Ready(Some(Err(self.fail("the answer is too large"))));
                    }
                    self.masker.push(data)
                }
            };
            match (masked.is_empty(), self.ended) {
                (false, _) => return Poll::Ready(Some(Ok(Frame::data(masked)))),
                (true, true) => return Poll::Ready(None),
                (true, false) => {}
            }
        }
    }
}
