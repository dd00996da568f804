//! The control socket, by which the command line reaches a running server. Requests pass the same router; the kernel
//! (`SO_PEERCRED`), not a token, identifies the peer as the home's owner.

use tokio::net::UnixStream;

/// Whether the peer runs as the server's user or as root.
pub(crate) fn is_owner(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
