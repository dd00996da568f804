//! An outgoing TCP connection that counts its bytes for the debugger, and records its last activity, so that idle ones
//! can be closed.

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

use crate::proxy_client::EgressReport;

/// The time of a connection's last read or write; clones share it.
#[derive(Clone)]
pub(crate) struct ActivityClock(Arc<Mutex<Instant>>);

impl ActivityClock {
    fn touch(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Returns when there was no activity for `idle`, or when `total` has passed since this was called.
    pub(crate) async fn wait_idle_or_expired(&self, idle: Duration, total: Duration) {
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

/// A TCP stream that records its activity. Its report is made when it is dropped.
pub(crate) struct ActivityStream {
    inner: TcpStream,
    activity: ActivityClock,
    report: EgressReport,
}

impl ActivityStream {
    pub(crate) fn new(inner: TcpStream, report: EgressReport) -> (Self, ActivityClock) {
        let activity = ActivityClock(Arc::new(Mutex::new(Instant::now())));
        (
            Self {
                inner,
                activity: activity.clone(),
                report,
            },
            activity,
        )
    }
}

impl AsyncRead for ActivityStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.inner).poll_read(cx, buf));
        self.activity.touch();
        self.report.record.bytes_in += buf.filled().len().saturating_sub(before) as u64;
        Poll::Ready(read)
    }
}

impl AsyncWrite for ActivityStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, buf));
        self.activity.touch();
        if let Ok(bytes) = &written {
            self.report.record.bytes_out += *bytes as u64;
        }
        Poll::Ready(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
