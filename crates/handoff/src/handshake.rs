//! Both ends of the hand-off protocol, over a Unix socket that the server listens on beside the relay socket.
//!
//! 1. The client sends its stdin and stdout as descriptors, with the agent's key.
//! 2. The server checks them and answers `ok`.
//! 3. The client confirms, and does not touch its stdin and stdout any more. Only then does the server read: a client
//!    that stopped waiting for `ok` still has everything the agent wrote.
//!
//! From then on the connection carries bytes: to the client what the agent wrote and the server did not answer
//! itself, to the server what the agent is to read. [`AGENT_CLOSED`] as the last byte to the client says that the agent
//! has closed its end; a connection that ends without it means that the server is gone.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::fd::BorrowedFd,
    path::Path,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use oubliette_os::{UntrustedSocket, UntrustedStream};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, Interest, ReadBuf},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use crate::descriptors::{CheckedDescriptor, HandedOffStdin, HandedOffStdout};

/// The last byte to the client when the agent has closed its end (ASCII EOT). It occurs in no JSON text.
pub(crate) const AGENT_CLOSED: u8 = 4;
/// The client's first message, sent with its descriptors; the agent's key, if any, and a newline follow.
const REQUEST: &[u8] = b"handoff 1 ";
/// The server's answer when it takes the descriptors. Closing the connection is a refusal.
const ACCEPTED: &[u8; 3] = b"ok\n";
/// The client's confirmation.
const CONFIRMED: &[u8; 1] = b"!";
/// Maximum handshake message, in bytes.
const MAX_MESSAGE: usize = 1024;
/// How long either side waits for the other.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// A completed hand-off, in the client.
#[derive(Debug)]
pub struct StdioHandoff(UnixStream);

/// Hands both streams off to the server that listens on `socket`.
///
/// When it fails the streams are the caller's to use as before.
pub async fn hand_off(
    socket: &Path,
    stdin: BorrowedFd<'_>,
    stdout: BorrowedFd<'_>,
    key: Option<&str>,
) -> io::Result<StdioHandoff> {
    let handshake = async {
        let mut stream = UnixStream::connect(socket).await?;
        let request = [REQUEST, key.unwrap_or_default().as_bytes(), b"\n"].concat();
        send(&stream, &request, &[stdin, stdout]).await?;
        let mut answer = [0; ACCEPTED.len()];
        stream.read_exact(&mut answer).await?;
        if answer != *ACCEPTED {
            return Err(io::Error::other("the server refused stdin and stdout"));
        }
        stream.write_all(CONFIRMED).await?;
        Ok(StdioHandoff(stream))
    };
    tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await?
}

impl StdioHandoff {
    /// What replaces stdin, and what replaces stdout.
    pub fn into_split(self) -> (HandoffReader, OwnedWriteHalf) {
        let (stream, writer) = self.0.into_split();
        let reader = HandoffReader {
            stream,
            agent_closed: false,
        };
        (reader, writer)
    }
}

/// What the agent wrote and the server did not answer itself. It ends when the agent has closed its end; when the
/// server is gone, reading fails with [`io::ErrorKind::UnexpectedEof`].
#[derive(Debug)]
pub struct HandoffReader {
    stream: OwnedReadHalf,
    /// The last byte was [`AGENT_CLOSED`]. It counts when nothing follows; otherwise it was not JSON, and nothing is
    /// lost by dropping it.
    agent_closed: bool,
}

impl AsyncRead for HandoffReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        loop {
            let read = ready!(Pin::new(&mut this.stream).poll_read(context, buf));
            let filled = buf.filled().len();
            if read.is_err() || filled == before {
                return Poll::Ready(match this.agent_closed {
                    true => Ok(()),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                });
            }
            this.agent_closed = buf.filled().last() == Some(&AGENT_CLOSED);
            buf.set_filled(filled - usize::from(this.agent_closed));
            if buf.filled().len() > before {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

/// A completed hand-off, in the server. It has no `Debug`: it holds the agent's key.
pub struct HandedOff {
    /// What the agent writes.
    pub stdin: HandedOffStdin,
    /// What the agent reads.
    pub stdout: HandedOffStdout,
    /// The connection to the client.
    pub client: UntrustedStream,
    /// The API key that the agent's calls of Oubliette's own tools are made under.
    pub key: Option<String>,
}

/// Accepts the hand-off of a client that has just connected.
pub async fn accept(client: UntrustedSocket) -> io::Result<HandedOff> {
    let mut client = UntrustedStream::new(client)?;
    let handshake = async {
        let (request, mut descriptors) = client.receive(MAX_MESSAGE).await?;
        // These were all: no more are taken.
        client.socket().refuse_descriptors();
        let key = request
            .strip_prefix(REQUEST)
            .and_then(|rest| rest.strip_suffix(b"\n"));
        let (Some(stdout), Some(stdin), true, Some(key)) = (
            descriptors.pop(),
            descriptors.pop(),
            descriptors.is_empty(),
            key.and_then(|key| std::str::from_utf8(key).ok()),
        ) else {
            return Err(io::Error::other("not a hand-off request"));
        };
        let key = Some(key.to_owned()).filter(|key| !key.is_empty());
        let worker = stdin.worker().clone();
        let checked = worker.run(|| {
            let checked = (
                CheckedDescriptor::check(stdin)?,
                CheckedDescriptor::check(stdout)?,
            );
            Ok::<_, io::Error>(checked)
        });
        let (stdin, stdout) = checked.await??;
        let (stdin, stdout) = (stdin.into_stdin()?, stdout.into_stdout()?);
        client.write_all(ACCEPTED).await?;
        let mut confirmation = [0; CONFIRMED.len()];
        client.read_exact(&mut confirmation).await?;
        match confirmation == *CONFIRMED {
            true => Ok((stdin, stdout, key)),
            false => Err(io::ErrorKind::InvalidData.into()),
        }
    };
    let (stdin, stdout, key) = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await??;
    Ok(HandedOff {
        stdin,
        stdout,
        client,
        key,
    })
}

/// Sends one handshake message with descriptors.
async fn send(stream: &UnixStream, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            Ok(rustix::net::sendmsg(
                stream,
                &[IoSlice::new(message)],
                &mut control,
                SendFlags::NOSIGNAL,
            )?)
        })
        .await?;
    match sent == message.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::Write as _,
        net::UdpSocket,
        os::fd::AsFd,
        os::unix::net::{UnixDatagram, UnixStream as StdStream},
    };

    use futures::FutureExt;
    use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener};
    use rustix::fs::{FileType, Mode, OFlags};

    use super::*;

    fn set_blocking(stream: BorrowedFd<'_>) {
        let flags = rustix::fs::fcntl_getfl(stream).unwrap();
        rustix::fs::fcntl_setfl(stream, flags - OFlags::NONBLOCK).unwrap();
    }

    fn connection() -> (UntrustedSocket, UnixStream) {
        let (near, far) = StdStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        let near = UntrustedSocket::new(near.into(), DescriptorWorker::default());
        (near, UnixStream::from_std(far).unwrap())
    }

    /// Hands these off over a socket of their own; both ends' results.
    async fn hand_over(
        stdin: impl AsFd,
        stdout: impl AsFd,
    ) -> (io::Result<StdioHandoff>, io::Result<HandedOff>) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("stdio.sock");
        let worker = DescriptorWorker::default();
        let listener = UntrustedListener::bind(&socket, PassedDescriptors::Expected, worker).unwrap();
        let accepting = async { accept(listener.accept().await.unwrap()).await };
        tokio::join!(
            hand_off(&socket, stdin.as_fd(), stdout.as_fd(), Some("oub_x")),
            accepting
        )
    }

    #[tokio::test]
    async fn pipes_and_streams_are_accepted_and_never_block() {
        let (pipe_out, mut pipe_in) = io::pipe().unwrap();
        let (mine, mut theirs) = StdStream::pair().unwrap();
        let others: [(&dyn AsFd, &mut dyn io::Write); 2] = [(&pipe_out, &mut pipe_in), (&mine, &mut theirs)];
        for (stdin, agent) in others {
            let (_, nowhere) = io::pipe().unwrap();
            let (client, server) = hand_over(stdin.as_fd(), &nowhere).await;
            let (_client, mut server) = (client.unwrap(), server.unwrap());
            assert_eq!(server.key.as_deref(), Some("oub_x"));
            // Whoever holds the same open file description may clear O_NONBLOCK.
            set_blocking(stdin.as_fd());
            let mut bytes = [0; 8];
            assert!(server.stdin.read(&mut bytes).now_or_never().is_none());
            agent.write_all(b"hi").unwrap();
            let read = server.stdin.read(&mut bytes).await.unwrap();
            assert_eq!(&bytes[..read], b"hi");
            assert!(server.stdin.read(&mut bytes).now_or_never().is_none());
        }
    }

    #[tokio::test]
    async fn descriptors_that_are_neither_pipe_nor_stream_are_refused() {
        let (pipe, _in) = io::pipe().unwrap();
        let file = tempfile::tempfile().unwrap();
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let datagrams = UnixDatagram::unbound().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let named = dir.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &named,
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        let named = File::options().read(true).write(true).open(named).unwrap();
        let refused: [&dyn AsFd; 5] = [&file, &null, &udp, &datagrams, &named];
        for odd in refused {
            for (stdin, stdout) in [(odd.as_fd(), pipe.as_fd()), (pipe.as_fd(), odd.as_fd())] {
                let (client, server) = hand_over(stdin, stdout).await;
                assert!(client.is_err() && server.is_err());
            }
        }
    }

    #[tokio::test]
    async fn a_client_that_does_not_confirm_keeps_what_the_agent_wrote() {
        let (mut stdin, mut agent) = io::pipe().unwrap();
        let (_, stdout) = io::pipe().unwrap();
        agent.write_all(b"hello").unwrap();
        let (near, mut far) = connection();
        let giving_up = async move {
            send(&far, b"handoff 1 \n", &[stdin.as_fd(), stdout.as_fd()])
                .await
                .unwrap();
            let mut answer = [0; 3];
            far.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"ok\n");
            drop(far);
            stdin
        };
        let (accepted, kept) = tokio::join!(accept(near), giving_up);
        assert!(accepted.is_err());
        stdin = kept;
        let mut bytes = [0; 8];
        assert_eq!(io::Read::read(&mut stdin, &mut bytes).unwrap(), 5);
    }

    #[tokio::test]
    async fn messages_that_are_no_hand_off_request_are_refused() {
        let (stdin, _agent) = io::pipe().unwrap();
        let one = [stdin.as_fd()];
        let both = [stdin.as_fd(), stdin.as_fd()];
        let requests: [(&[u8], &[BorrowedFd<'_>]); 5] = [
            (b"handoff 1 \n", &one),
            (b"handoff 1 \n", &[]),
            (b"handoff 1 oub_x", &both),
            (b"handoff 1 \xff\n", &both),
            (b"{}\n", &both),
        ];
        for (request, descriptors) in requests {
            let (near, far) = connection();
            send(&far, request, descriptors).await.unwrap();
            assert!(accept(near).await.is_err());
        }
    }

    #[tokio::test]
    async fn the_agents_end_and_the_servers_end_are_told_apart() {
        for (sent, text, agent_closed) in [
            (&b"line\n\x04"[..], "line\n", true),
            (b"\x04", "", true),
            (b"line\n", "line\n", false),
            (b"", "", false),
        ] {
            let (near, mut far) = UnixStream::pair().unwrap();
            let (mut reader, _writer) = StdioHandoff(near).into_split();
            far.write_all(sent).await.unwrap();
            drop(far);
            let mut bytes = Vec::new();
            let read = reader.read_to_end(&mut bytes).await;
            assert_eq!(bytes, text.as_bytes());
            match agent_closed {
                true => assert_eq!(read.unwrap(), text.len()),
                false => assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
            }
        }
    }
}
