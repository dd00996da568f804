//! Closes connections whose client is still sending a body that was refused. Closing a socket with unread bytes resets
//! it, and the client would get an error instead of the response; so the rest of the body is read and discarded first,
//! within bounds. The response says `Connection: close`, so that the client sends no further request there.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

/// How much of a refused body is read and discarded at most, in bytes.
const DISCARD_MAX_BYTES: usize = 64 * 1024 * 1024;
/// How long a refused body is read at most.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// A stream whose shutdown discards what the client still sends, if a request's body was not read to its end.
pub(crate) struct LingeringClose<S> {
    stream: S,
    unread: UnreadBody,
    /// Begins when the sending side is shut down.
    discarding: Option<DiscardLimits>,
}

/// Whether a body of this connection was dropped before its end. Clones share one flag.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnreadBody(Arc<AtomicBool>);

struct DiscardLimits {
    deadline: Pin<Box<Sleep>>,
    remaining: usize,
}

impl<S> LingeringClose<S> {
    /// Wraps a stream. Bodies of its requests have to be wrapped with the returned flag.
    pub(crate) fn new(stream: S) -> (Self, UnreadBody) {
        let unread = UnreadBody::default();
        let this = Self {
            stream,
            unread: unread.clone(),
            discarding: None,
        };
        (this, unread)
    }
}

impl UnreadBody {
    /// Tells the client that its connection is closed after this response, if a body was not read to its end: what the
    /// client still sends of it cannot be told from a next request.
    pub(crate) fn announce_close<B>(&self, response: &mut http::Response<B>) {
        if self.0.load(Ordering::Acquire) {
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
    }

    /// Wraps the body of a request, so that it is noticed if it is not read to its end.
    pub(crate) fn watch<B: Body>(&self, body: B) -> WatchedBody<B> {
        WatchedBody {
            body,
            ended: false,
            unread: self.clone(),
        }
    }
}

/// A request's body that reports when it is dropped before its end.
pub(crate) struct WatchedBody<B: Body> {
    body: B,
    ended: bool,
    unread: UnreadBody,
}

impl<B: Body<Data = Bytes> + Unpin> Body for WatchedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.ended |= frame.is_none();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B: Body> Drop for WatchedBody<B> {
    fn drop(&mut self) {
        if !self.ended && !self.body.is_end_stream() {
            self.unread.0.store(true, Ordering::Release);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LingeringClose<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for LingeringClose<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.discarding.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        }
        if !this.unread.0.load(Ordering::Acquire) {
            return Poll::Ready(Ok(()));
        }
        let discarding = this.discarding.get_or_insert_with(|| DiscardLimits {
            deadline: Box::pin(tokio::time::sleep(DISCARD_TIMEOUT)),
            remaining: DISCARD_MAX_BYTES,
        });
        let mut scratch = [0; 8 * 1024];
        while discarding.remaining > 0 && discarding.deadline.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buf)) {
                Ok(()) if !buf.filled().is_empty() => {
                    discarding.remaining = discarding.remaining.saturating_sub(buf.filled().len());
                }
                Ok(()) | Err(_) => break,
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Full};
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    const SMALL: &[u8] = b"body";

    #[tokio::test(start_paused = true)]
    async fn what_is_still_sent_is_discarded_only_after_an_unread_body() {
        let (mut client, server) = tokio::io::duplex(64);
        let (mut server, unread) = LingeringClose::new(server);
        drop(unread.watch(Full::new(Bytes::from_static(SMALL))));
        let sent = tokio::spawn(async move {
            client.write_all(&[0; 4096]).await.unwrap();
            client
        });
        server.shutdown().await.unwrap();
        drop(sent.await.unwrap());

        let (_client, server) = tokio::io::duplex(64);
        let (mut server, unread) = LingeringClose::new(server);
        let body = unread.watch(Full::new(Bytes::from_static(SMALL)));
        assert_eq!(body.collect().await.unwrap().to_bytes(), SMALL);
        let begun = tokio::time::Instant::now();
        server.shutdown().await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO, "nothing is waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_neither_sends_nor_closes_is_not_waited_for_long() {
        let (_client, server) = tokio::io::duplex(64);
        let (mut server, unread) = LingeringClose::new(server);
        drop(unread.watch(Full::new(Bytes::from_static(SMALL))));
        let begun = tokio::time::Instant::now();
        server.shutdown().await.unwrap();
        assert!(begun.elapsed() >= DISCARD_TIMEOUT && begun.elapsed() < 2 * DISCARD_TIMEOUT);
    }
}
