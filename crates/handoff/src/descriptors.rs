//! The two descriptors that a client handed off, as the server uses them.
//!
//! Descriptors from a sandbox are hostile: whoever holds the same open file description can change its flags at any
//! time. Only unnamed pipes and Unix stream sockets are taken, because only with these a read or write cannot be made
//! to block the server: a pipe is reopened, which gives an open file description of our own, and a socket is read,
//! written and closed as a [`SharedSocket`].

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll},
};

use oubliette_os::{SharedSocket, UntrustedDescriptor};
use rustix::{
    fs::{FileType, Mode, OFlags},
    net::{AddressFamily, SocketType},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::unix::pipe,
};

/// The `f_type` of the file system of unnamed pipes (`PIPEFS_MAGIC`). A named pipe has that of its directory.
const PIPEFS_MAGIC: u64 = 0x5049_5045;

/// A descriptor of a kind that can be used without blocking.
pub(crate) enum CheckedDescriptor {
    Pipe(OwnedFd),
    Socket(UntrustedDescriptor),
}

impl CheckedDescriptor {
    /// Refuses everything but unnamed pipes and Unix stream sockets. It may block: `fstatfs` can ask a file system
    /// that the sandbox serves (FUSE).
    pub(crate) fn check(descriptor: UntrustedDescriptor) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&descriptor)?;
        match FileType::from_raw_mode(stat.st_mode) {
            // Closing an unnamed pipe does not block.
            FileType::Fifo if is_unnamed_pipe(&descriptor)? => Ok(Self::Pipe(descriptor.into_trusted())),
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
            Self::Socket(socket) => StdinSource::Socket(SharedSocket::new(socket, Interest::READABLE)?),
        }))
    }

    pub(crate) fn into_stdout(self) -> io::Result<HandedOffStdout> {
        Ok(HandedOffStdout(match self {
            Self::Pipe(pipe) => {
                StdoutTarget::Pipe(pipe::Sender::from_owned_fd(reopen(&pipe, OFlags::WRONLY)?)?)
            }
            Self::Socket(socket) => StdoutTarget::Socket(SharedSocket::new(socket, Interest::WRITABLE)?),
        }))
    }
}

fn is_unnamed_pipe(descriptor: &UntrustedDescriptor) -> io::Result<bool> {
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

/// The client's stdin: what the agent writes.
#[derive(Debug)]
pub struct HandedOffStdin(StdinSource);

#[derive(Debug)]
enum StdinSource {
    Pipe(pipe::Receiver),
    Socket(SharedSocket),
}

/// The client's stdout: what the agent reads.
#[derive(Debug)]
pub struct HandedOffStdout(StdoutTarget);

#[derive(Debug)]
enum StdoutTarget {
    Pipe(pipe::Sender),
    Socket(SharedSocket),
}

impl AsyncRead for HandedOffStdin {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.0 {
            StdinSource::Pipe(pipe) => Pin::new(pipe).poll_read(context, buf),
            StdinSource::Socket(socket) => Pin::new(socket).poll_read(context, buf),
        }
    }
}

impl AsyncWrite for HandedOffStdout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            StdoutTarget::Pipe(pipe) => Pin::new(pipe).poll_write(context, bytes),
            StdoutTarget::Socket(socket) => Pin::new(socket).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
