//! A connection out that notices when nothing moves on it any more.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Instant,
};

/// When a byte last went either way.
#[derive(Clone)]
pub(crate) struct Pulse(Arc<Mutex<Instant>>);

impl Pulse {
    fn beat(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns when nothing has moved for `idle`, or when `total` is over.
    pub(crate) async fn ended(&self, idle: Duration, total: Duration) {
        let end = Instant::now() + total;
        loop {
            let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let due = (last + idle).min(end);
            if Instant::now() >= due {
                return;
            }
            tokio::time::sleep_until(due).await;
        }
    }
}

/// A connection with its pulse taken.
pub(crate) struct Watched {
    inner: TcpStream,
    pulse: Pulse,
}

impl Watched {
    pub(crate) fn new(inner: TcpStream) -> (Self, Pulse) {
        let pulse = Pulse(Arc::new(Mutex::new(Instant::now())));
        (
            Self {
                inner,
                pulse: pulse.clone(),
            },
            pulse,
        )
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.inner).poll_read(cx, buf));
        self.pulse.beat();
        Poll::Ready(read)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, buf));
        self.pulse.beat();
        Poll::Ready(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
