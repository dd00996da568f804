//! Ends connections whose client sends the head of a request too slowly. hyper's own timeout also runs while a
//! connection is idle between requests, which has to be allowed for much longer.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

/// A stream whose reads fail if the head of a request has begun and is not complete in time.
pub(crate) struct HeadTimeout<S> {
    stream: S,
    timeout: Duration,
    requests: RequestCount,
    /// The count when the stream was last read.
    seen: u64,
    head_begun: bool,
    /// Runs while a head has begun and is not complete.
    deadline: Option<Pin<Box<Sleep>>>,
}

/// The requests of one connection: odd while one is served. Clones share one count.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestCount(Arc<AtomicU64>);

/// One request that is served, until dropped.
#[derive(Debug)]
pub(crate) struct RequestServed(RequestCount);

impl RequestCount {
    /// Counts a request whose head is complete. What is read until it is answered is its body.
    pub(crate) fn begin(&self) -> RequestServed {
        self.0.fetch_add(1, Ordering::AcqRel);
        RequestServed(self.clone())
    }
}

impl Drop for RequestServed {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::AcqRel);
    }
}

impl<S> HeadTimeout<S> {
    /// Wraps a stream. The returned count has to be told of every request.
    pub(crate) fn new(stream: S, timeout: Duration) -> (Self, RequestCount) {
        let requests = RequestCount::default();
        let this = Self {
            stream,
            timeout,
            requests: requests.clone(),
            seen: 0,
            head_begun: false,
            deadline: None,
        };
        (this, requests)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HeadTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let count = this.requests.0.load(Ordering::Acquire);
        if count != this.seen {
            this.seen = count;
            this.head_begun = false;
            this.deadline = None;
        }
        let before = buf.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut this.stream).poll_read(cx, buf) {
            this.head_begun |= count.is_multiple_of(2) && buf.filled().len() > before;
            return Poll::Ready(read);
        }
        if !this.head_begun {
            return Poll::Pending;
        }
        let timeout = this.timeout;
        let deadline = this
            .deadline
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the head of a request came too slowly",
        )))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HeadTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const LONG: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_head_that_has_begun_has_to_be_completed() {
        let (mut client, server) = tokio::io::duplex(64);
        let (mut server, requests) = HeadTimeout::new(server, TIMEOUT);
        let mut buf = [0; 8];
        let idle = tokio::time::timeout(LONG, server.read(&mut buf)).await;
        assert!(idle.is_err(), "a connection may be idle");
        client.write_all(b"G").await.unwrap();
        assert_eq!(server.read(&mut buf).await.unwrap(), 1);
        let slow = tokio::time::timeout(LONG, server.read(&mut buf)).await.unwrap();
        assert_eq!(slow.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(requests);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_may_be_slow_and_the_connection_idle_afterwards() {
        let (mut client, server) = tokio::io::duplex(64);
        let (mut server, requests) = HeadTimeout::new(server, TIMEOUT);
        let mut buf = [0; 8];
        client.write_all(b"HEAD").await.unwrap();
        assert_eq!(server.read(&mut buf).await.unwrap(), 4);
        let served = requests.begin();
        client.write_all(b"b").await.unwrap();
        assert_eq!(server.read(&mut buf).await.unwrap(), 1);
        assert!(tokio::time::timeout(LONG, server.read(&mut buf)).await.is_err());
        drop(served);
        assert!(tokio::time::timeout(LONG, server.read(&mut buf)).await.is_err());
        client.write_all(b"N").await.unwrap();
        assert_eq!(server.read(&mut buf).await.unwrap(), 1);
        assert!(
            tokio::time::timeout(LONG, server.read(&mut buf))
                .await
                .unwrap()
                .is_err()
        );
    }
}
