//! How the client lends its stdin and stdout to the server, over a socket beside the relay's.
//!
//! The client sends both descriptors; the server answers with a descriptor of the [`Journal`]; the client says
//! go. Only then does the server read: a client that gave up waiting still has everything the agent wrote. From
//! then on the connection carries bytes: to the client what the agent wrote and the server did not take, to the
//! server what the agent shall read. The client's part ends with [`END`], which says that the agent is gone;
//! without it, the server is.
//!
//! What a sandbox lends is hostile. Only pipes and Unix streams are taken, and neither can make a read or a write
//! block: a pipe is opened anew, a stream is asked not to each time.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketType,
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{UnixStream, unix::pipe},
};

use crate::journal::Journal;

/// The last byte to the client: the agent has closed its end. No JSON has it.
pub(crate) const END: u8 = 4;
/// What the client says first, with its descriptors; the agent's key may follow.
const HELLO: &[u8] = b"stdio 1 ";
/// The longest word either side says.
const WORD: usize = 1024;
/// What it says when it has let go of them.
const GO: u8 = b'!';
/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);
/// The file system of pipes that have no name.
const PIPEFS: u64 = 0x5049_5045;

/// The socket streams are lent over, beside the relay's.
pub fn socket_beside(relay: &Path) -> PathBuf {
    relay.with_file_name(oubliette_protocol::relay::STDIO_SOCKET_NAME)
}

/// The client's side of a loan.
pub(crate) struct Loan {
    pub(crate) stream: UnixStream,
    pub(crate) journal: OwnedFd,
}

/// Lends both streams to the server whose relay socket this is.
pub(crate) async fn offer(
    relay: &Path,
    stdin: BorrowedFd<'_>,
    stdout: BorrowedFd<'_>,
    key: Option<&str>,
) -> io::Result<Loan> {
    let offered = async {
        let stream = UnixStream::connect(socket_beside(relay)).await?;
        let hello = [HELLO, key.unwrap_or_default().as_bytes(), b"\n"].concat();
        send(&stream, &hello, &[stdin, stdout]).await?;
        let (said, mut descriptors) = receive(&stream).await?;
        let (Some(journal), true, b"ok\n") = (descriptors.pop(), descriptors.is_empty(), &*said) else {
            return Err(io::Error::other("the server does not want them"));
        };
        send(&stream, &[GO], &[]).await?;
        Ok(Loan { stream, journal })
    };
    tokio::time::timeout(PATIENCE, offered).await?
}

/// The server's side of a loan. It has no `Debug`: it has the agent's key.
pub struct Borrowed {
    /// What the agent writes.
    pub stdin: Stdin,
    /// What it reads.
    pub stdout: Stdout,
    /// The client.
    pub client: UnixStream,
    /// Which calls are open.
    pub journal: Journal,
    /// The key the agent's own calls of Oubliette's tools show.
    pub key: Option<String>,
}

/// Borrows the streams of a client that has just connected.
pub async fn borrow(client: UnixStream) -> io::Result<Borrowed> {
    let borrowed = async {
        let (said, mut descriptors) = receive(&client).await?;
        let key = said.strip_prefix(HELLO).and_then(|rest| rest.strip_suffix(b"\n"));
        let (Some(stdout), Some(stdin), true, Some(key)) = (
            descriptors.pop(),
            descriptors.pop(),
            descriptors.is_empty(),
            key.and_then(|key| std::str::from_utf8(key).ok()),
        ) else {
            return Err(io::Error::other("not a loan"));
        };
        let key = Some(key.to_owned()).filter(|key| !key.is_empty());
        // Looking at a descriptor may ask a file system that is not ours.
        let look =
            tokio::task::spawn_blocking(|| Ok::<_, io::Error>((Lent::look(stdin)?, Lent::look(stdout)?)));
        let (stdin, stdout) = look.await.map_err(io::Error::other)??;
        let (stdin, stdout) = (stdin.reading()?, stdout.writing()?);
        let journal = Journal::new()?;
        send(&client, b"ok\n", &[journal.file()]).await?;
        match &*receive(&client).await?.0 {
            [GO] => Ok((stdin, stdout, journal, key)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    };
    let (stdin, stdout, journal, key) = tokio::time::timeout(PATIENCE, borrowed).await??;
    Ok(Borrowed {
        stdin,
        stdout,
        client,
        journal,
        key,
    })
}

async fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            Ok(rustix::net::sendmsg(
                stream,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            )?)
        })
        .await?;
    match sent == bytes.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// A short word, and what came with it.
async fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = [0; WORD];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    stream
        .async_io(Interest::READABLE, || {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::net::recvmsg(
                stream,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )?;
            let descriptors = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            });
            let descriptors = descriptors.flatten().collect();
            Ok((bytes[..received.bytes].to_vec(), descriptors))
        })
        .await
}

/// A descriptor that was looked at.
enum Lent {
    Pipe(OwnedFd),
    Stream(OwnedFd),
}

impl Lent {
    fn look(descriptor: OwnedFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&descriptor)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Fifo if is_pipe(&descriptor)? => Ok(Self::Pipe(descriptor)),
            FileType::Socket
                if rustix::net::sockopt::socket_domain(&descriptor)? == AddressFamily::UNIX
                    && rustix::net::sockopt::socket_type(&descriptor)? == SocketType::STREAM =>
            {
                Ok(Self::Stream(descriptor))
            }
            _ => Err(io::Error::other("neither a pipe nor a Unix stream")),
        }
    }

    fn reading(self) -> io::Result<Stdin> {
        Ok(Stdin(match self {
            Self::Pipe(pipe) => From::Pipe(pipe::Receiver::from_owned_fd(reopened(&pipe, OFlags::RDONLY)?)?),
            Self::Stream(stream) => From::Stream(watched(stream)?),
        }))
    }

    fn writing(self) -> io::Result<Stdout> {
        Ok(Stdout(match self {
            Self::Pipe(pipe) => To::Pipe(pipe::Sender::from_owned_fd(reopened(&pipe, OFlags::WRONLY)?)?),
            Self::Stream(stream) => To::Stream(watched(stream)?),
        }))
    }
}

fn is_pipe(descriptor: &OwnedFd) -> io::Result<bool> {
    let file_system = rustix::fs::fstatfs(descriptor)?;
    Ok(u64::try_from(file_system.f_type).is_ok_and(|kind| kind == PIPEFS))
}

/// The runtime wants it so; who else holds the stream may undo it, and each read and write says it again.
fn watched(stream: OwnedFd) -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(stream);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// The client's part when a loan is over: a stream that the server had not to block blocks again.
pub(crate) fn restore(stream: impl AsFd) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(&stream) {
        let _ = rustix::fs::fcntl_setfl(&stream, flags - OFlags::NONBLOCK);
    }
}

/// The same pipe, opened anew: whether it blocks is ours alone to say.
fn reopened(pipe: &OwnedFd, way: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        way | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// What the agent writes.
#[derive(Debug)]
pub struct Stdin(From);

#[derive(Debug)]
enum From {
    Pipe(pipe::Receiver),
    Stream(UnixStream),
}

/// What the agent reads.
#[derive(Debug)]
pub struct Stdout(To);

#[derive(Debug)]
enum To {
    Pipe(pipe::Sender),
    Stream(UnixStream),
}

impl AsyncRead for Stdin {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.0 {
            From::Pipe(pipe) => Pin::new(pipe).poll_read(context, buf),
            From::Stream(stream) => loop {
                ready!(stream.poll_read_ready(context))?;
                let read = stream.try_io(Interest::READABLE, || {
                    let room = buf.initialize_unfilled();
                    Ok(rustix::net::recv(&*stream, room, RecvFlags::DONTWAIT)?.0)
                });
                match read {
                    Ok(read) => {
                        buf.advance(read);
                        return Poll::Ready(Ok(()));
                    }
                    Err(why) if again(&why) => {}
                    Err(why) => return Poll::Ready(Err(why)),
                }
            },
        }
    }
}

fn again(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl AsyncWrite for Stdout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            To::Pipe(pipe) => Pin::new(pipe).poll_write(context, bytes),
            To::Stream(stream) => loop {
                ready!(stream.poll_write_ready(context))?;
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let send = || Ok(rustix::net::send(&*stream, bytes, flags)?);
                match stream.try_io(Interest::WRITABLE, send) {
                    Err(why) if again(&why) => {}
                    written => return Poll::Ready(written),
                }
            },
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::Write as _,
        net::UdpSocket,
        os::unix::net::{UnixDatagram, UnixStream as StdStream},
    };

    use futures::FutureExt;
    use tokio::{io::AsyncReadExt, net::UnixListener};

    use super::*;

    /// Lends these over a socket of their own.
    async fn lend(stdin: impl AsFd, stdout: impl AsFd) -> (io::Result<Loan>, io::Result<Borrowed>) {
        let dir = tempfile::tempdir().unwrap();
        let relay = dir.path().join("relay.sock");
        let listener = UnixListener::bind(socket_beside(&relay)).unwrap();
        let borrowing = async { borrow(listener.accept().await.unwrap().0).await };
        tokio::join!(
            offer(&relay, stdin.as_fd(), stdout.as_fd(), Some("oub_x")),
            borrowing
        )
    }

    #[tokio::test]
    async fn pipes_and_streams_are_borrowed_and_never_block() {
        let (pipe_out, mut pipe_in) = io::pipe().unwrap();
        let (mine, mut theirs) = StdStream::pair().unwrap();
        let others: [(&dyn AsFd, &mut dyn io::Write); 2] = [(&pipe_out, &mut pipe_in), (&mine, &mut theirs)];
        for (stdin, agent) in others {
            let (_, nowhere) = io::pipe().unwrap();
            let (loan, borrowed) = lend(stdin.as_fd(), &nowhere).await;
            let (_loan, mut borrowed) = (loan.unwrap(), borrowed.unwrap());
            assert_eq!(borrowed.key.as_deref(), Some("oub_x"));
            // Whoever holds the same stream may have it block again.
            restore(stdin.as_fd());
            let mut bytes = [0; 8];
            assert!(borrowed.stdin.read(&mut bytes).now_or_never().is_none());
            agent.write_all(b"hi").unwrap();
            let read = borrowed.stdin.read(&mut bytes).await.unwrap();
            assert_eq!(&bytes[..read], b"hi");
            assert!(borrowed.stdin.read(&mut bytes).now_or_never().is_none());
        }
    }

    #[tokio::test]
    async fn what_is_neither_pipe_nor_stream_is_refused() {
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
                let (loan, borrowed) = lend(stdin, stdout).await;
                assert!(loan.is_err() && borrowed.is_err());
            }
        }
    }

    #[tokio::test]
    async fn a_client_that_does_not_say_go_keeps_what_the_agent_wrote() {
        let (mut stdin, mut agent) = io::pipe().unwrap();
        let (_, stdout) = io::pipe().unwrap();
        agent.write_all(b"hello").unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let giving_up = async move {
            send(&far, b"stdio 1 \n", &[stdin.as_fd(), stdout.as_fd()])
                .await
                .unwrap();
            let (said, journal) = receive(&far).await.unwrap();
            assert_eq!((&*said, journal.len()), (&b"ok\n"[..], 1));
            drop(far);
            stdin
        };
        let (borrowed, kept) = tokio::join!(borrow(near), giving_up);
        assert!(borrowed.is_err());
        stdin = kept;
        let mut bytes = [0; 8];
        assert_eq!(io::Read::read(&mut stdin, &mut bytes).unwrap(), 5);
    }

    #[tokio::test]
    async fn words_that_are_no_loan_are_refused() {
        let (stdin, _agent) = io::pipe().unwrap();
        let one = [stdin.as_fd()];
        let both = [stdin.as_fd(), stdin.as_fd()];
        let words: [(&[u8], &[BorrowedFd<'_>]); 5] = [
            (b"stdio 1 \n", &one),
            (b"stdio 1 \n", &[]),
            (b"stdio 1 oub_x", &both),
            (b"stdio 1 \xff\n", &both),
            (b"{}\n", &both),
        ];
        for (said, descriptors) in words {
            let (near, far) = UnixStream::pair().unwrap();
            send(&far, said, descriptors).await.unwrap();
            assert!(borrow(near).await.is_err());
        }
    }
}
