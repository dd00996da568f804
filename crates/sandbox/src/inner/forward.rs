//! Forwarding of `127.0.0.1:port` inside to a Unix socket of the server.
//!
//! All connections are served by the inner stage's one thread with non-blocking I/O, so they do not count against
//! the payload's process limit.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::StageError;
use crate::control_protocol::AllowedPeers;
use crate::spec::PortForward;

/// Maximum connections at once; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// Buffer of each direction of a connection.
const BUFFER_BYTES: usize = 16 * 1024;

/// All forwarded ports and their connections.
pub(super) struct PortForwarder {
    /// Each listener, and the Unix socket it leads to.
    listeners: Vec<(TcpListener, PathBuf)>,
    allowed_peers: AllowedPeers,
    connections: Vec<ForwardedConnection>,
}

impl PortForwarder {
    /// Listens on the wanted ports.
    pub(super) fn listen(wanted: &[PortForward], allowed_peers: AllowedPeers) -> Result<Self, StageError> {
        let mut listeners = Vec::with_capacity(wanted.len());
        for forward in wanted {
            let step = format!("listening on 127.0.0.1:{}", forward.port);
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, forward.port))
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .map_err(|error| StageError::at(&step, error))?;
            listeners.push((listener, forward.socket.clone()));
        }
        Ok(Self {
            listeners,
            allowed_peers,
            connections: Vec::new(),
        })
    }

    /// Adds the descriptors and events to poll for.
    pub(super) fn poll_interests<'a>(&'a self, add: &mut impl FnMut(BorrowedFd<'a>, PollFlags)) {
        if self.connections.len() < MAX_CONNECTIONS {
            self.listeners
                .iter()
                .for_each(|(listener, _)| add(listener.as_fd(), PollFlags::IN));
        }
        self.connections
            .iter()
            .for_each(|connection| connection.poll_interests(add));
    }

    /// Accepts, reads and writes as far as possible without waiting.
    pub(super) fn transfer(&mut self) {
        for (listener, socket) in &self.listeners {
            while self.connections.len() < MAX_CONNECTIONS {
                let Ok((tcp, peer)) = listener.accept() else { break };
                if self.allowed_peers == AllowedPeers::SameUser && !is_same_user(peer) {
                    continue;
                }
                // If the Unix socket cannot be reached, the TCP connection is dropped and so closed.
                self.connections
                    .extend(ForwardedConnection::new(tcp, socket).ok());
            }
        }
        self.connections.retain_mut(ForwardedConnection::transfer);
    }
}

/// Whether the peer of a loopback connection belongs to our own user, according to `/proc/net/tcp`.
fn is_same_user(peer: SocketAddr) -> bool {
    let SocketAddr::V4(peer) = peer else {
        return false;
    };
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    socket_owner(&table, peer) == Some(rustix::process::getuid().as_raw())
}

/// The uid that owns a local address in `/proc/net/tcp`, whose lines are `sl local remote state queues timer
/// retransmits uid …`, with addresses in the machine's byte order.
fn socket_owner(table: &str, peer: SocketAddrV4) -> Option<u32> {
    let wanted = format!(
        "{:08X}:{:04X}",
        u32::from_ne_bytes(peer.ip().octets()),
        peer.port()
    );
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        (fields.nth(1)? == wanted)
            .then(|| fields.nth(5)?.parse().ok())
            .flatten()
    })
}

/// One forwarded connection.
struct ForwardedConnection {
    tcp: TcpStream,
    unix: UnixStream,
    to_unix: CopyDirection,
    to_tcp: CopyDirection,
}

/// One direction of a connection.
struct CopyDirection {
    buffer: Vec<u8>,
    /// Bytes of `buffer` already written.
    sent: usize,
    state: CopyState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyState {
    Open,
    /// End of file was read; buffered bytes are still to be written.
    Draining,
    Closed,
}

impl ForwardedConnection {
    fn new(tcp: TcpStream, socket: &Path) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        tcp.set_nodelay(true)?;
        // Non-blocking from the start: a server that does not accept must not block the loop in `connect`.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let unix = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&unix, &SocketAddrUnix::new(socket)?)?;
        Ok(Self {
            tcp,
            unix: UnixStream::from(unix),
            to_unix: CopyDirection::new(),
            to_tcp: CopyDirection::new(),
        })
    }

    fn poll_interests<'a>(&'a self, add: &mut impl FnMut(BorrowedFd<'a>, PollFlags)) {
        let flags = |reading: &CopyDirection, writing: &CopyDirection| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reading.wants_read());
            flags.set(PollFlags::OUT, writing.wants_write());
            flags
        };
        // A descriptor without wanted events is left out: poll would report its hang-up again and again.
        let (tcp, unix) = (
            flags(&self.to_unix, &self.to_tcp),
            flags(&self.to_tcp, &self.to_unix),
        );
        if !tcp.is_empty() {
            add(self.tcp.as_fd(), tcp);
        }
        if !unix.is_empty() {
            add(self.unix.as_fd(), unix);
        }
    }

    /// Copies both directions as far as possible. Returns whether the connection stays open.
    fn transfer(&mut self) -> bool {
        let ForwardedConnection {
            tcp,
            unix,
            to_unix,
            to_tcp,
        } = self;
        if to_unix
            .copy(&*tcp, &*unix, || unix.shutdown(Shutdown::Write))
            .is_err()
        {
            // A server may answer and close before it has read the whole request; its answer is still
            // delivered.
            to_unix.close();
            let _ = unix.shutdown(Shutdown::Write);
        }
        let answered = to_tcp.copy(&*unix, &*tcp, || tcp.shutdown(Shutdown::Write));
        answered.is_ok() && (to_unix.state != CopyState::Closed || to_tcp.state != CopyState::Closed)
    }
}

impl CopyDirection {
    fn new() -> Self {
        Self {
            buffer: Vec::new(),
            sent: 0,
            state: CopyState::Open,
        }
    }

    fn close(&mut self) {
        *self = Self {
            state: CopyState::Closed,
            ..Self::new()
        };
    }

    fn wants_read(&self) -> bool {
        self.state == CopyState::Open && self.buffer.is_empty()
    }

    fn wants_write(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Copies from one side to the other as far as possible; calls `end` after the last byte.
    fn copy(
        &mut self,
        mut from: impl io::Read,
        mut to: impl io::Write,
        end: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        // Bounded, so that one busy connection does not delay the others or the handling of a signal.
        for _ in 0..16 {
            if self.wants_read() {
                self.buffer.resize(BUFFER_BYTES, 0);
                let read = from.read(&mut self.buffer);
                self.buffer.truncate(*read.as_ref().unwrap_or(&0));
                match read {
                    Ok(0) => self.state = CopyState::Draining,
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                }
            }
            match self.wants_write().then(|| to.write(&self.buffer[self.sent..])) {
                None => break,
                Some(Ok(written)) => self.sent += written,
                Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Some(Err(error)) => return Err(error),
            }
            if self.sent == self.buffer.len() {
                // Frees the buffer, so that an idle connection uses no memory.
                self.buffer = Vec::new();
                self.sent = 0;
            }
        }
        if self.state == CopyState::Draining && self.buffer.is_empty() {
            self.state = CopyState::Closed;
            // Fails if the other side has already closed the connection.
            let _ = end();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_a_connection_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_, peer) = listener.accept().unwrap();
        assert!(is_same_user(peer));
        let table =
            "  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1234        0 1 1";
        let peer = |port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        #[cfg(target_endian = "little")]
        assert_eq!(socket_owner(table, peer(8080)), Some(1234));
        assert_eq!(socket_owner(table, peer(8081)), None);
    }
}
