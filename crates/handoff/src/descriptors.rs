//! The two descriptors that a client handed off, as the server uses them.
//!
//! Descriptors from a sandbox are hostile: whoever holds the same open file description can change its flags at any
//! time. Only unnamed pipes and Unix stream sockets are taken, because only with these a read or write cannot be made
//! to block the server: a pipe is reopened, which gives an open file description of our own, and each operation on a
//! socket carries `MSG_DONTWAIT`.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
};

use rustix::{
    fs::{FileType, Mode, OFlags},
    net::{AddressFamily, RecvFlags, SendFlags, SocketType},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{UnixStream, unix::pipe},
};

/// The `f_type` of the file system of unnamed pipes (`PIPEFS_MAGIC`). A named pipe has that of its directory.
const PIPEFS_MAGIC: u64 = 0x5049_5045;

/// A descriptor of a kind that can be used without blocking.
pub(crate) enum CheckedDescriptor {
    Pipe(OwnedFd),
    Socket(OwnedFd),
}

impl CheckedDescriptor {
    /// Refuses everything but unnamed pipes and Unix stream sockets. It may block: `fstatfs` can ask a file system
    /// that the sandbox serves (FUSE).
    pub(crate) fn check(descriptor: OwnedFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&descriptor)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Fifo if is_unnamed_pipe(&descriptor)? => Ok(Self::Pipe(descriptor)),
            FileType::Socket
                if rustix::net::sockopt::socket_domain(&descriptor)? == AddressFamily::UNIX
                    && rustix::net::sockopt::socket_type(&descriptor)? == SocketType::STREAM =>
            {
                Ok(Self::Socket(descriptor))
            }
            _ => Err(io::Error::other(
                "a handed-off descriptor is neither an unnamed pipe nor a Unix stream socket",
            )),
        }
    }

    pub(crate) fn into_stdin(self) -> io::Result<HandedOffStdin> {
        Ok(HandedOffStdin(match self {
            Self::Pipe(pipe) => {
                StdinSource::Pipe(pipe::Receiver::from_owned_fd(reopen(&pipe, OFlags::RDONLY)?)?)
            }
            Self::Socket(socket) => StdinSource::Socket(register(socket)?),
        }))
    }

    pub(crate) fn into_stdout(self) -> io::Result<HandedOffStdout> {
        Ok(HandedOffStdout(match self {
            Self::Pipe(pipe) => {
                StdoutTarget::Pipe(pipe::Sender::from_owned_fd(reopen(&pipe, OFlags::WRONLY)?)?)
            }
            Self::Socket(socket) => StdoutTarget::Socket(register(socket)?),
        }))
    }
}

fn is_unnamed_pipe(descriptor: &OwnedFd) -> io::Result<bool> {
    let file_system = rustix::fs::fstatfs(descriptor)?;
    Ok(u64::try_from(file_system.f_type).is_ok_and(|kind| kind == PIPEFS_MAGIC))
}

/// Opens the same pipe again, so that nobody else can change whether it blocks.
fn reopen(pipe: &OwnedFd, access: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        access | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Registers a socket with the runtime, which requires `O_NONBLOCK`. Another holder may clear that flag again, so
/// reads and writes pass `MSG_DONTWAIT` as well.
fn register(socket: OwnedFd) -> io::Result<UnixStream> {
    let socket = std::os::unix::net::UnixStream::from(socket);
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}

/// The client's stdin: what the agent writes.
#[derive(Debug)]
pub struct HandedOffStdin(StdinSource);

#[derive(Debug)]
enum StdinSource {
    Pipe(pipe::Receiver),
    Socket(UnixStream),
}

/// The client's stdout: what the agent reads.
#[derive(Debug)]
pub struct HandedOffStdout(StdoutTarget);

#[derive(Debug)]
enum StdoutTarget {
    Pipe(pipe::Sender),
    Socket(UnixStream),
}

impl AsyncRead for HandedOffStdin {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.0 {
            StdinSource::Pipe(pipe) => Pin::new(pipe).poll_read(context, buf),
            StdinSource::Socket(socket) => loop {
                ready!(socket.poll_read_ready(context))?;
                let read = socket.try_io(Interest::READABLE, || {
                    let room = buf.initialize_unfilled();
                    Ok(rustix::net::recv(&*socket, room, RecvFlags::DONTWAIT)?.0)
                });
                match read {
                    Ok(read) => {
                        buf.advance(read);
                        return Poll::Ready(Ok(()));
                    }
                    Err(why) if is_retryable(&why) => {}
                    Err(why) => return Poll::Ready(Err(why)),
                }
            },
        }
    }
}

fn is_retryable(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl AsyncWrite for HandedOffStdout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            StdoutTarget::Pipe(pipe) => Pin::new(pipe).poll_write(context, bytes),
            StdoutTarget::Socket(socket) => loop {
                ready!(socket.poll_write_ready(context))?;
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let send = || Ok(rustix::net::send(&*socket, bytes, flags)?);
                match socket.try_io(Interest::WRITABLE, send) {
                    Err(why) if is_retryable(&why) => {}
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
