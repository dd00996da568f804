//! A Unix stream that wakes nobody without need.
//!
//! A stream is usually watched in both directions, and the kernel says that it can be written each time the
//! other side has read something: one wake-up for every line, for nothing. Here only reading is watched, and
//! writing just while there is no room for it.

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

/// Both halves of a stream. What reads is a pipe's end, which is watched in one direction and else the same.
pub(crate) fn halves(stream: tokio::net::UnixStream) -> io::Result<(Receiver, Writing)> {
    let stream = stream.into_std()?;
    let reading = Receiver::from_owned_fd_unchecked(stream.try_clone()?.into())?;
    Ok((reading, Writing { stream, room: None }))
}

/// The half that is written.
pub(crate) struct Writing {
    stream: UnixStream,
    /// Watched while there is no room.
    room: Option<Sender>,
}

impl AsyncWrite for Writing {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            if let Some(room) = &mut self.room {
                let written = ready!(Pin::new(room).poll_write(context, bytes));
                self.room = None;
                return Poll::Ready(written);
            }
            match self.stream.write(bytes) {
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                    let stream = self.stream.try_clone()?;
                    self.room = Some(Sender::from_owned_fd_unchecked(stream.into())?);
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
        let (_, mut writing) = halves(ours).unwrap();
        let (mut reading, _) = halves(theirs).unwrap();
        let sent: Vec<u8> = (0..5_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let want = sent.clone();
        let writer = tokio::spawn(async move {
            writing.write_all(&sent).await.unwrap();
            assert!(writing.room.is_none(), "it is no longer watched");
            writing.shutdown().await.unwrap();
        });
        let mut got = Vec::new();
        reading.read_to_end(&mut got).await.unwrap();
        writer.await.unwrap();
        assert!(got == want);
    }

    #[tokio::test]
    async fn a_writer_that_waits_learns_of_the_others_end() {
        let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        let (_reading, mut writing) = halves(ours).unwrap();
        let writer = tokio::spawn(async move { writing.write_all(&vec![0; 10_000_000]).await });
        let mut theirs = theirs;
        theirs.read_exact(&mut [0; 100_000]).await.unwrap();
        drop(theirs);
        assert!(writer.await.unwrap().is_err());
    }
}
