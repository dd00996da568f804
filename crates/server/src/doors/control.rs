//! The control socket, by which the command line reaches a running server. Requests pass the same router; the kernel
//! (`SO_PEERCRED`), not a token, identifies the peer as the home's owner.

use std::{io, os::unix::fs::PermissionsExt as _, path::Path};

use tokio::net::{UnixListener, UnixStream};

/// Listens on a socket that only the server's user can open. A socket left by a killed server is replaced; this
/// process must hold the home's lock, so that no other server uses it.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Whether the peer runs as the server's user or as root.
pub(crate) fn is_owner(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
