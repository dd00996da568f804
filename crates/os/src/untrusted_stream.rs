//! An [`UntrustedSocket`] as an asynchronous stream.
//!
//! It is registered for reading only, and for writing just while a write would block: tokio's own stream is registered
//! for both, and the kernel then reports it writable each time the other side has read something, which is one useless
//! wake-up for every message.

use std::{
    io::{self, IoSlice},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

use crate::{
    DescriptorWorker, UntrustedDescriptor, UntrustedSocket,
    untrusted_socket::{StableDescriptor, register},
};

const SEND_FLAGS: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// A connected socket, registered with the runtime it was made on.
#[derive(Debug)]
pub struct UntrustedStream {
    reader: UntrustedReader,
    writer: UntrustedWriter,
}

impl UntrustedStream {
    /// Registers a socket with the current runtime.
    pub fn new(socket: UntrustedSocket) -> io::Result<Self> {
        let socket = Arc::new(socket);
        Ok(Self {
            reader: UntrustedReader(register(socket.clone(), Interest::READABLE)?),
            writer: UntrustedWriter {
                socket,
                writable: None,
            },
        })
    }

    /// A stream that was connected or accepted elsewhere, and not read from.
    pub fn from_connected(stream: tokio::net::UnixStream, worker: DescriptorWorker) -> io::Result<Self> {
        Self::new(UntrustedSocket::new(stream.into_std()?.into(), worker))
    }

    /// The two halves. The socket is closed when both are dropped.
    pub fn into_split(self) -> (UntrustedReader, UntrustedWriter) {
        (self.reader, self.writer)
    }

    /// The socket.
    pub fn socket(&self) -> &UntrustedSocket {
        &self.writer.socket
    }

    /// Receives what was sent, at most `most` bytes of it, and the descriptors passed along.
    pub async fn receive(&mut self, most: usize) -> io::Result<(Vec<u8>, Vec<UntrustedDescriptor>)> {
        let mut bytes = Vec::with_capacity(most);
        loop {
            let mut ready = self.reader.0.readable().await?;
            let received = ready.try_io(|socket| {
                let (received, descriptors) = socket.get_ref().receive(bytes.spare_capacity_mut())?;
                Ok((received, descriptors))
            });
            let Ok(received) = received else { continue };
            let (received, descriptors) = received?;
            // SAFETY: the kernel wrote this many bytes.
            #[allow(unsafe_code)]
            unsafe {
                bytes.set_len(received);
            }
            return Ok((bytes, descriptors));
        }
    }
}

/// The reading half.
#[derive(Debug)]
pub struct UntrustedReader(AsyncFd<Arc<UntrustedSocket>>);

/// The writing half.
#[derive(Debug)]
pub struct UntrustedWriter {
    socket: Arc<UntrustedSocket>,
    /// Registered for writability while the send buffer is full.
    writable: Option<AsyncFd<DuplicatedSocket>>,
}

/// Another descriptor of the same socket, because one can be registered only once. The fields are dropped in this order,
/// so that this descriptor is never the last.
#[derive(Debug)]
struct DuplicatedSocket {
    descriptor: OwnedFd,
    _socket: Arc<UntrustedSocket>,
}

impl StableDescriptor for DuplicatedSocket {}
impl StableDescriptor for Arc<UntrustedSocket> {}

impl AsRawFd for DuplicatedSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

impl AsyncRead for UntrustedReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        poll_receive(&self.0, context, buf, |socket, buffer| {
            socket.receive_bytes(buffer)
        })
    }
}

/// Reads from a registered socket with a function that receives without waiting.
pub(crate) fn poll_receive<S: AsRawFd>(
    socket: &AsyncFd<S>,
    context: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
    receive: impl Fn(&S, &mut [std::mem::MaybeUninit<u8>]) -> io::Result<usize>,
) -> Poll<io::Result<()>> {
    loop {
        let mut ready = ready!(socket.poll_read_ready(context))?;
        // SAFETY: nothing is de-initialised: the kernel only writes to it.
        #[allow(unsafe_code)]
        let room = unsafe { buf.unfilled_mut() };
        let most = room.len();
        match receive(socket.get_ref(), room) {
            Ok(received) => {
                // Less than there was room for: nothing is left, so the next read need not try.
                if 0 < received && received < most {
                    ready.clear_ready();
                }
                // SAFETY: the kernel wrote this many bytes.
                #[allow(unsafe_code)]
                unsafe {
                    buf.assume_init(received);
                }
                buf.advance(received);
                return Poll::Ready(Ok(()));
            }
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Poll::Ready(Err(why)),
        }
    }
}

impl UntrustedWriter {
    /// Sends with a function that does not wait, once there is space.
    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        send: impl Fn(&UntrustedSocket) -> rustix::io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if let Some(writable) = &self.writable {
                let mut ready = ready!(writable.poll_write_ready(context))?;
                match send(&self.socket) {
                    Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                    Err(rustix::io::Errno::INTR) => {}
                    sent => {
                        self.writable = None;
                        return Poll::Ready(sent.map_err(Into::into));
                    }
                }
                continue;
            }
            match send(&self.socket) {
                Err(rustix::io::Errno::AGAIN) => {
                    let duplicated = DuplicatedSocket {
                        descriptor: rustix::io::fcntl_dupfd_cloexec(&*self.socket, 0)?,
                        _socket: self.socket.clone(),
                    };
                    self.writable = Some(register(duplicated, Interest::WRITABLE)?);
                }
                Err(rustix::io::Errno::INTR) => {}
                sent => return Poll::Ready(sent.map_err(Into::into)),
            }
        }
    }
}

impl AsyncWrite for UntrustedWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |socket| rustix::net::send(socket, bytes, SEND_FLAGS))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, |socket| {
            rustix::net::sendmsg(socket, bytes, &mut SendAncillaryBuffer::default(), SEND_FLAGS)
        })
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&*self.socket, Shutdown::Write).map_err(Into::into))
    }
}

impl AsyncRead for UntrustedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.reader).poll_read(context, buf)
    }
}

impl AsyncWrite for UntrustedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.writer).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.writer).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_shutdown(context)
    }
}

/// A socket that others hold too, such as one that was passed here: its flags and options may change at any time, so
/// nothing is assumed of them. It is always closed by the worker.
#[derive(Debug)]
pub struct SharedSocket(AsyncFd<UntrustedDescriptor>);

impl SharedSocket {
    /// Registers a stream socket with the current runtime, for one direction.
    pub fn new(socket: UntrustedDescriptor, direction: Interest) -> io::Result<Self> {
        Ok(Self(register(socket, direction)?))
    }
}

impl AsyncRead for SharedSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        poll_receive(&self.0, context, buf, crate::untrusted_socket::receive_bytes)
    }
}

impl AsyncWrite for SharedSocket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.0.poll_write_ready(context))?;
            match rustix::net::send(self.0.get_ref(), bytes, SEND_FLAGS) {
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                sent => return Poll::Ready(sent.map_err(Into::into)),
            }
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
mod tests;
