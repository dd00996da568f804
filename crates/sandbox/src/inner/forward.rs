//! `127.0.0.1:port` inside, carried to a Unix socket of the server.
//!
//! All connections are carried by the one thread there is: they neither count against the payload's
//! processes nor can be starved by them.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Stop;
use crate::spec::Forward;
use crate::wire::Guests;

/// Connections at once; more wait to be accepted.
const MOST: usize = 256;
const BUFFER: usize = 16 * 1024;

pub(super) struct Forwards {
    doors: Vec<(TcpListener, PathBuf)>,
    guests: Guests,
    links: Vec<Link>,
}

impl Forwards {
    pub(super) fn listen(wanted: &[Forward], guests: Guests) -> Result<Self, Stop> {
        let mut doors = Vec::with_capacity(wanted.len());
        for forward in wanted {
            let step = format!("listening on 127.0.0.1:{}", forward.port);
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, forward.port))
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .map_err(|error| Stop::at(&step, error))?;
            doors.push((listener, forward.socket.clone()));
        }
        Ok(Self {
            doors,
            guests,
            links: Vec::new(),
        })
    }

    /// What to wait for.
    pub(super) fn interests<'a>(&'a self, add: &mut impl FnMut(BorrowedFd<'a>, PollFlags)) {
        if self.links.len() < MOST {
            self.doors
                .iter()
                .for_each(|(door, _)| add(door.as_fd(), PollFlags::IN));
        }
        self.links.iter().for_each(|link| link.interests(add));
    }

    /// Does whatever can be done without waiting.
    pub(super) fn carry(&mut self) {
        for (door, socket) in &self.doors {
            while self.links.len() < MOST {
                let Ok((tcp, guest)) = door.accept() else { break };
                if self.guests == Guests::SameUser && !same_user(guest) {
                    continue;
                }
                // Dropping the connection tells the client what there is to tell.
                self.links.extend(Link::new(tcp, socket).ok());
            }
        }
        self.links.retain_mut(Link::carry);
    }
}

/// Whether the socket at the other end of a connection within this host belongs to our own user, as the
/// kernel's table of connections tells.
fn same_user(guest: SocketAddr) -> bool {
    let SocketAddr::V4(guest) = guest else {
        return false;
    };
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    owner(&table, guest) == Some(rustix::process::getuid().as_raw())
}

/// `sl local remote state queues timer retransmits uid …`, addresses in the machine's byte order.
fn owner(table: &str, guest: SocketAddrV4) -> Option<u32> {
    let wanted = format!(
        "{:08X}:{:04X}",
        u32::from_ne_bytes(guest.ip().octets()),
        guest.port()
    );
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        (fields.nth(1)? == wanted)
            .then(|| fields.nth(5)?.parse().ok())
            .flatten()
    })
}

/// One connection.
struct Link {
    tcp: TcpStream,
    unix: UnixStream,
    out: Half,
    back: Half,
}

/// One direction of it.
struct Half {
    buffer: Vec<u8>,
    sent: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing more to read; what is buffered is still to be written.
    Draining,
    Closed,
}

impl Link {
    fn new(tcp: TcpStream, socket: &Path) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        tcp.set_nodelay(true)?;
        // A server that does not accept must not stop the loop, so even connecting does not wait.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let unix = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&unix, &SocketAddrUnix::new(socket)?)?;
        Ok(Self {
            tcp,
            unix: UnixStream::from(unix),
            out: Half::new(),
            back: Half::new(),
        })
    }

    fn interests<'a>(&'a self, add: &mut impl FnMut(BorrowedFd<'a>, PollFlags)) {
        let flags = |reading: &Half, writing: &Half| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, reading.wants_read());
            flags.set(PollFlags::OUT, writing.wants_write());
            flags
        };
        // One that waits for nothing is left out: poll would report its hang-up again and again.
        let (tcp, unix) = (flags(&self.out, &self.back), flags(&self.back, &self.out));
        if !tcp.is_empty() {
            add(self.tcp.as_fd(), tcp);
        }
        if !unix.is_empty() {
            add(self.unix.as_fd(), unix);
        }
    }

    /// Whether the connection lives on.
    fn carry(&mut self) -> bool {
        let Link { tcp, unix, out, back } = self;
        if out
            .carry(&*tcp, &*unix, || unix.shutdown(Shutdown::Write))
            .is_err()
        {
            // A server may answer and close before it has read everything: the answer still counts.
            out.close();
            let _ = unix.shutdown(Shutdown::Write);
        }
        let answered = back.carry(&*unix, &*tcp, || tcp.shutdown(Shutdown::Write));
        answered.is_ok() && (out.state != State::Closed || back.state != State::Closed)
    }
}

impl Half {
    fn new() -> Self {
        Self {
            buffer: Vec::new(),
            sent: 0,
            state: State::Open,
        }
    }

    fn close(&mut self) {
        *self = Self {
            state: State::Closed,
            ..Self::new()
        };
    }

    fn wants_read(&self) -> bool {
        self.state == State::Open && self.buffer.is_empty()
    }

    fn wants_write(&self) -> bool {
        !self.buffer.is_empty()
    }

    fn carry(
        &mut self,
        mut from: impl io::Read,
        mut to: impl io::Write,
        end: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        // Bounded, so that one busy connection does not keep the others, or a signal, waiting.
        for _ in 0..16 {
            if self.wants_read() {
                self.buffer.resize(BUFFER, 0);
                let read = from.read(&mut self.buffer);
                self.buffer.truncate(*read.as_ref().unwrap_or(&0));
                match read {
                    Ok(0) => self.state = State::Draining,
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
                // An idle connection holds no memory.
                self.buffer = Vec::new();
                self.sent = 0;
            }
        }
        if self.state == State::Draining && self.buffer.is_empty() {
            self.state = State::Closed;
            // The other side may have closed for good already.
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
        let (_, guest) = listener.accept().unwrap();
        assert!(same_user(guest));
        let table =
            "  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1234        0 1 1";
        let guest = |port| SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        #[cfg(target_endian = "little")]
        assert_eq!(owner(table, guest(8080)), Some(1234));
        assert_eq!(owner(table, guest(8081)), None);
    }
}
