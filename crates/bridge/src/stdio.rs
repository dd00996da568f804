//! The agent's end: stdin and stdout, lent to the server or not.

use std::{
    io,
    os::fd::AsFd,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use oubliette_relay::{CallError, Closed};
use rmcp::transport::io::{StdioReader, StdioWriter, stdio_pipes};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
};

use crate::{
    express::respond,
    journal::Reader,
    loan::{self, END, Loan},
    out::{Out, Outlet, Spare},
    outcome::{failed, to_mcp},
};

/// Opens both, and lends them where a server wants them.
pub(crate) async fn open(relay: &Path, key: Option<&str>) -> (Stdin, Arc<Out>) {
    let lent = loan::offer(relay, io::stdin().as_fd(), io::stdout().as_fd(), key).await;
    let (from, out) = match lent {
        Ok(Loan { stream, journal }) => {
            let (read, write) = stream.into_split();
            let journal = Arc::new(Reader::new(journal));
            let lent = Lent {
                read,
                journal: journal.clone(),
                last: false,
            };
            (From::Server(lent), Out::start(Mouth::Server(write, journal)))
        }
        // A server that has no use for them, or none at all yet: the relay is enough.
        Err(_) => {
            let (read, write) = stdio_pipes();
            (From::Agent(read), Out::start(Mouth::Agent(write)))
        }
    };
    let stdin = Stdin {
        from,
        out: out.clone(),
    };
    (stdin, out)
}

/// What the agent writes.
pub(crate) struct Stdin {
    from: From,
    out: Arc<Out>,
}

/// Where the agent's bytes come from.
enum From {
    Agent(StdioReader),
    /// By way of the server, which took out what it answers itself.
    Server(Lent),
}

struct Lent {
    read: OwnedReadHalf,
    journal: Arc<Reader>,
    /// The last byte was [`END`]. It counts when nothing follows; else it was no JSON, and is not missed.
    last: bool,
}

/// What came.
enum Came {
    Bytes,
    AgentGone,
    ServerGone,
}

impl Lent {
    fn poll_read(&mut self, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Came> {
        let before = buf.filled().len();
        loop {
            let polled = ready!(Pin::new(&mut self.read).poll_read(context, buf));
            let filled = buf.filled().len();
            if polled.is_err() || filled == before {
                return Poll::Ready(match self.last {
                    true => Came::AgentGone,
                    false => Came::ServerGone,
                });
            }
            self.last = buf.filled().last() == Some(&END);
            buf.set_filled(filled - usize::from(self.last));
            if buf.filled().len() > before {
                return Poll::Ready(Came::Bytes);
            }
        }
    }
}

impl AsyncRead for Stdin {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let lent = match &mut this.from {
                From::Agent(stdin) => return Pin::new(stdin).poll_read(context, buf),
                From::Server(lent) => lent,
            };
            match ready!(lent.poll_read(context, buf)) {
                Came::Bytes | Came::AgentGone => return Poll::Ready(Ok(())),
                Came::ServerGone => {
                    eprintln!(
                        "oubliette-client: the server has gone; stdin and stdout are read and written here again"
                    );
                    this.out.fall_back();
                    // What cannot be read is empty: the file is in memory.
                    for id in lent.journal.left().unwrap_or_default() {
                        let mut lost = to_mcp(failed(CallError::Closed(Closed::ByPeer)), None);
                        lost.result_type = None;
                        // Memory takes it; an agent that is gone is noticed where its stdin is read.
                        let _ = respond(&this.out, None, &id, &lost);
                    }
                    loan::restore(io::stdin());
                    this.from = From::Agent(stdio_pipes().0);
                }
            }
        }
    }
}

/// Where the agent's answers go.
pub(crate) enum Mouth {
    Agent(StdioWriter),
    /// By way of the server.
    Server(OwnedWriteHalf, Arc<Reader>),
}

impl Mouth {
    fn inner(self: Pin<&mut Self>) -> Pin<&mut dyn AsyncWrite> {
        match self.get_mut() {
            Self::Agent(stdout) => Pin::<&mut StdioWriter>::new(stdout),
            Self::Server(stream, _) => Pin::<&mut OwnedWriteHalf>::new(stream),
        }
    }
}

impl AsyncWrite for Mouth {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.inner().poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(context)
    }
}

impl Outlet for Mouth {
    fn arrived(&self) -> Option<u64> {
        match self {
            Self::Agent(_) => None,
            Self::Server(_, journal) => Some(journal.passed()),
        }
    }

    fn spare(&self) -> Option<Spare<Self>> {
        match self {
            Self::Agent(_) => None,
            Self::Server(_, journal) => {
                loan::restore(io::stdout());
                Some(Spare {
                    stream: Self::Agent(stdio_pipes().1),
                    cut: journal.cut(),
                })
            }
        }
    }
}
