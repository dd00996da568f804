//! Unix stream sockets whose other end may mean harm.
//!
//! Whoever sends on a Unix socket can pass descriptors along (`SCM_RIGHTS`). If the receiver makes no room for them, the
//! kernel closes them in the receiver's own system call, and closing may block ([`descriptor_worker`]). So:
//!
//! - Since Linux 6.16 a listener can refuse descriptors (`SO_PASSRIGHTS`): sending them fails, and none is ever queued.
//! - Before that, every read makes room for as many as one message can carry. Whoever passes one has its connection
//!   ended, and the worker closes them.
//! - Descriptors that are still queued when a socket is closed are closed with it. A socket is therefore closed in place
//!   only after it was shut down and found empty, else by the worker.
//! - A byte sent out of band is dropped by the next read, with its descriptors, unless it is kept in line
//!   (`SO_OOBINLINE`).
//!
//! [`descriptor_worker`]: crate::descriptor_worker

use std::{
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::PermissionsExt as _,
    },
    path::Path,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{DescriptorWorker, UntrustedDescriptor};

/// `SO_PASSRIGHTS` of `<asm-generic/socket.h>`.
const SO_PASSRIGHTS: libc::c_int = 83;
/// `SCM_PIDFD` of `<linux/socket.h>`: a descriptor of the sender, for those who asked for it.
const SCM_PIDFD: libc::c_int = 4;
/// How many connections may wait to be accepted; the kernel caps it.
const BACKLOG: i32 = 1024;
/// Room for everything the kernel can add to one message: at most 253 descriptors, and the sender's credentials, pidfd
/// and security label, which a holder of a shared socket can ask for.
const CONTROL_WORDS: usize = 256;

/// Whether the other end may pass descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassedDescriptors {
    /// They are refused, or close the connection.
    Refused,
    /// They are taken by [`UntrustedSocket::receive`].
    Expected,
}

/// Creates a listening socket of mode 0600, replacing a file that a killed process left in its place.
pub(crate) fn listen_privately(path: &Path, descriptors: PassedDescriptors) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    if descriptors == PassedDescriptors::Refused {
        // Before anybody can connect: accepted sockets inherit it.
        refuse_descriptors(socket.as_fd());
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Has the kernel refuse descriptors sent to this socket; kernels before Linux 6.16 cannot.
#[allow(unsafe_code)]
pub(crate) fn refuse_descriptors(socket: BorrowedFd<'_>) {
    let off: libc::c_int = 0;
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is an int that outlives the call.
    let _ = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            size,
        )
    };
}

/// Keeps its descriptor open, and the same, as long as it lives.
pub(crate) trait StableDescriptor: AsRawFd {}

impl StableDescriptor for UntrustedDescriptor {}

/// Registers a descriptor with the current runtime.
#[allow(unsafe_code)]
pub(crate) fn register<T: StableDescriptor>(descriptor: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: by the trait's condition.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

/// A listening socket. Connections that nobody accepted are closed by the worker, with the socket.
#[derive(Debug)]
pub struct UntrustedListener(AsyncFd<UntrustedDescriptor>);

impl UntrustedListener {
    /// Listens on a socket of mode 0600, replacing a file that a killed process left in its place. Whoever calls this
    /// must know that no running process uses it, and that nobody else can enter the directory.
    pub fn bind(path: &Path, descriptors: PassedDescriptors, worker: DescriptorWorker) -> io::Result<Self> {
        let socket = UntrustedDescriptor::new(listen_privately(path, descriptors)?, worker);
        Ok(Self(register(socket, Interest::READABLE)?))
    }

    /// Accepts a connection, once the worker has room. Cancel-safe.
    pub async fn accept(&self) -> io::Result<UntrustedSocket> {
        loop {
            self.0.get_ref().worker().room().await;
            let mut ready = self.0.readable().await?;
            let accept = |socket: &AsyncFd<UntrustedDescriptor>| {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                Ok(rustix::net::accept_with(socket.get_ref(), flags)?)
            };
            if let Ok(accepted) = ready.try_io(accept) {
                return Ok(UntrustedSocket::new(accepted?, self.0.get_ref().worker().clone()));
            }
        }
    }
}

impl Drop for UntrustedListener {
    fn drop(&mut self) {
        // The worker closes it later; from here on nobody can connect.
        let _ = rustix::net::shutdown(self.0.get_ref(), rustix::net::Shutdown::Both);
    }
}

/// A connected socket that nobody else holds. It is not registered with a runtime: see
/// [`UntrustedStream`](crate::UntrustedStream).
#[derive(Debug)]
pub struct UntrustedSocket(Option<UntrustedDescriptor>);

impl UntrustedSocket {
    /// A socket in non-blocking mode that nobody has read from.
    pub fn new(socket: OwnedFd, worker: DescriptorWorker) -> Self {
        let _ = sockopt::set_socket_oobinline(&socket, true);
        Self(Some(UntrustedDescriptor::new(socket, worker)))
    }

    /// The process id of whoever connected.
    pub fn peer_pid(&self) -> Option<u32> {
        let peer = sockopt::socket_peercred(self).ok()?;
        u32::try_from(peer.pid.as_raw_pid()).ok()
    }

    /// The user id of whoever connected.
    pub fn peer_uid(&self) -> Option<u32> {
        Some(sockopt::socket_peercred(self).ok()?.uid.as_raw())
    }

    /// From now on the other end may pass no descriptors.
    pub fn refuse_descriptors(&self) {
        refuse_descriptors(self.as_fd());
    }

    /// Receives without waiting, and refuses descriptors: see [`receive_bytes`].
    pub(crate) fn receive_bytes(&self, buffer: &mut [MaybeUninit<u8>]) -> io::Result<usize> {
        match &self.0 {
            Some(descriptor) => receive_bytes(descriptor, buffer),
            None => Ok(0),
        }
    }

    /// Receives without waiting what was sent, with the descriptors passed along.
    pub(crate) fn receive(
        &self,
        buffer: &mut [MaybeUninit<u8>],
    ) -> io::Result<(usize, Vec<UntrustedDescriptor>)> {
        match &self.0 {
            Some(descriptor) => receive(descriptor, buffer),
            None => Ok((0, Vec::new())),
        }
    }
}

impl AsFd for UntrustedSocket {
    #[allow(clippy::expect_used, reason = "only dropping takes it out")]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl AsRawFd for UntrustedSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for UntrustedSocket {
    fn drop(&mut self) {
        let Some(descriptor) = self.0.take() else { return };
        // Nothing can be queued after the shutdown, and what has no bytes has no descriptors: an empty socket is closed
        // here, which is the rule.
        let shut = rustix::net::shutdown(&descriptor, rustix::net::Shutdown::Both);
        if shut.is_ok() && rustix::io::ioctl_fionread(&descriptor) == Ok(0) {
            drop(descriptor.into_trusted());
        }
    }
}

/// Receives without waiting. When the other end passed descriptors, the worker closes them and the error says so; when
/// the worker has no room, nothing is received.
pub fn receive_bytes(socket: &UntrustedDescriptor, buffer: &mut [MaybeUninit<u8>]) -> io::Result<usize> {
    if !socket.worker().has_room() {
        return Err(io::Error::other("descriptors it passed are still being closed"));
    }
    let (received, descriptors) = receive_message(socket.as_fd(), buffer)?;
    if descriptors.is_empty() {
        return Ok(received);
    }
    socket.worker().close(descriptors);
    Err(io::Error::other("the other side passed a descriptor"))
}

fn receive(
    socket: &UntrustedDescriptor,
    buffer: &mut [MaybeUninit<u8>],
) -> io::Result<(usize, Vec<UntrustedDescriptor>)> {
    let (received, descriptors) = receive_message(socket.as_fd(), buffer)?;
    let descriptors = descriptors.into_iter();
    let descriptors = descriptors.map(|each| UntrustedDescriptor::new(each, socket.worker().clone()));
    Ok((received, descriptors.collect()))
}

/// `recvmsg` that does not wait. It is called directly because rustix wants an initialised buffer: clearing one of
/// megabytes before each read would cost more than the read.
#[allow(unsafe_code)]
fn receive_message(
    socket: BorrowedFd<'_>,
    buffer: &mut [MaybeUninit<u8>],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = [MaybeUninit::<u64>::uninit(); CONTROL_WORDS];
    let mut bytes = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: every field of it may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message points to both buffers, with their sizes, and they outlive the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    if message.msg_controllen == 0 {
        return Ok((received, Vec::new()));
    }
    // SAFETY: the kernel filled the message in, and its control buffer is aligned.
    Ok((received, unsafe { passed_descriptors(&message) }))
}

/// The descriptors that came with a message.
///
/// # Safety
///
/// The message was filled in by `recvmsg`, its control buffer is aligned, and it is passed here once.
#[allow(unsafe_code)]
unsafe fn passed_descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    // SAFETY: by the condition above, as for the calls below.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: the pointer is to a header within the control buffer.
        let (level, kind, length) =
            unsafe { ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) };
        if level == libc::SOL_SOCKET && matches!(kind, libc::SCM_RIGHTS | SCM_PIDFD) {
            // SAFETY: an entry of this kind holds descriptors, which the kernel made ours.
            unsafe {
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                let bytes = length.saturating_sub(libc::CMSG_LEN(0) as usize);
                for at in 0..bytes / size_of::<RawFd>() {
                    let descriptor = data.add(at).read_unaligned();
                    // A pidfd that could not be made is a negative number.
                    if descriptor >= 0 {
                        descriptors.push(OwnedFd::from_raw_fd(descriptor));
                    }
                }
            }
        }
        // SAFETY: as for the first header.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    descriptors
}
