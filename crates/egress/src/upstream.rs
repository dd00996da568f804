//! The two bodies of a request passed on: what goes out, counted; what comes back, counted, timed
//! and reported when it is over.

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

use crate::{answer::BoxError, gateway::Report};

/// A request's body, up to a limit.
pub(crate) struct Outgoing {
    inner: Incoming,
    left: u64,
    too_large: Arc<AtomicBool>,
}

impl Outgoing {
    /// The flag says afterwards whether the limit was what ended it.
    pub(crate) fn new(inner: Incoming, most: u64) -> (Self, Arc<AtomicBool>) {
        let too_large = Arc::new(AtomicBool::new(false));
        (
            Self {
                inner,
                left: most,
                too_large: too_large.clone(),
            },
            too_large,
        )
    }
}

impl Body for Outgoing {
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
        match self.left.checked_sub(size) {
            Some(left) => self.left = left,
            None => {
                self.too_large.store(true, Ordering::Release);
                return Poll::Ready(Some(Err("the request is too large".into())));
            }
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

/// A provider's answer on its way into the sandbox. A limit that is hit breaks the connection off,
/// so that nobody takes what came so far for the whole.
pub(crate) struct Returning {
    inner: BoxStream<'static, reqwest::Result<Bytes>>,
    left: u64,
    deadline: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
    _report: Report,
}

impl Returning {
    pub(crate) fn new(
        response: reqwest::Response,
        most: u64,
        deadline: tokio::time::Instant,
        permit: OwnedSemaphorePermit,
        report: Report,
    ) -> Self {
        Self {
            inner: response.bytes_stream().boxed(),
            left: most,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            _permit: permit,
            _report: report,
        }
    }
}

impl Stream for Returning {
    type Item = Result<Frame<Bytes>, BoxError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the request took too long".into())));
        }
        match ready!(self.inner.poll_next_unpin(cx)) {
            None => Poll::Ready(None),
            Some(Err(error)) => Poll::Ready(Some(Err(error.without_url().into()))),
            Some(Ok(data)) => match self.left.checked_sub(data.len() as u64) {
                Some(left) => {
                    self.left = left;
                    Poll::Ready(Some(Ok(Frame::data(data))))
                }
                None => Poll::Ready(Some(Err("the response is too large".into()))),
            },
        }
    }
}
