//! The agent's end: stdin and stdout, and the moment stdin ends.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use rmcp::transport::io::{StdioReader, StdioWriter, stdio_pipes};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::sync::CancellationToken;

/// Stdin that says when it has ended.
pub(crate) struct Stdin {
    inner: StdioReader,
    ended: CancellationToken,
}

/// Both streams, and the token that fires when stdin ends.
pub(crate) fn open() -> (Stdin, StdioWriter, CancellationToken) {
    let (inner, out) = stdio_pipes();
    let ended = CancellationToken::new();
    (
        Stdin {
            inner,
            ended: ended.clone(),
        },
        out,
        ended,
    )
}

impl AsyncRead for Stdin {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(context, buf);
        let ended = match &polled {
            Poll::Ready(Ok(())) => buf.filled().len() == before && buf.remaining() > 0,
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        };
        if ended {
            self.ended.cancel();
        }
        polled
    }
}
