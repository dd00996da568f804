//! A Unix stream that is polled for writability only while its send buffer is full.
//!
//! tokio registers a stream for both directions, and the kernel then reports it writable each time the other
//! side has read something: one useless wake-up for every line. Here the stream is registered for reading
//! only, and for writing just while a write would block.

use std::{
    io::{self, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::AsyncWrite,
    net::unix::pipe::{Receiver, Sender},
};

/// Splits a stream. The reading half is tokio's pipe receiver, because it is registered for reading only and
/// otherwise works on a socket just as well.
pub(crate) fn split(stream: tokio::net::UnixStream) -> io::Result<(Receiver, UnixWriteHalf)> {
    let stream = stream.into_std()?;
    let reading = Receiver::from_owned_fd_unchecked(stream.try_clone()?.into())?;
    Ok((
        reading,
        UnixWriteHalf {
            stream,
            writable: None,
        },
    ))
}

/// The writing half.
pub(crate) struct UnixWriteHalf {
    stream: UnixStream,
    /// Registered for writability while the send buffer is full.
    writable: Option<Sender>,
}

impl AsyncWrite for UnixWriteHalf {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            if let Some(writable) = &mut self.writable {
                let written = ready!(Pin::new(writable).poll_write(context, bytes));
                self.writable = None;
                return Poll::Ready(written);
            }
            match self.stream.write(bytes) {
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                    let stream = self.stream.try_clone()?;
                    self.writable = Some(Sender::from_owned_fd_unchecked(stream.into())?);
                }
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn everything_arrives_though_the_stream_is_full_again_and_again() {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        let (_, mut writing) = split(ours).unwrap();
        let (mut reading, _) = split(theirs).unwrap();
        let sent: Vec<u8> = (0..5_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let want = sent.clone();
        let writer = tokio::spawn(async move {
            writing.write_all(&sent).await.unwrap();
            assert!(writing.writable.is_none(), "it is no longer watched");
            writing.shutdown().await.unwrap();
        });
        let mut got = Vec::new();
        reading.read_to_end(&mut got).await.unwrap();
        writer.await.unwrap();
        assert!(got == want);
    }

    #[tokio::test]
    async fn a_blocked_writer_fails_when_the_other_end_closes() {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        let (_reading, mut writing) = split(ours).unwrap();
        let writer = tokio::spawn(async move { writing.write_all(&vec![0; 10_000_000]).await });
        let mut theirs = theirs;
        theirs.read_exact(&mut [0; 100_000]).await.unwrap();
        drop(theirs);
        assert!(writer.await.unwrap().is_err());
    }
}
