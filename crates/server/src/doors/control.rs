//! The control socket: commands of the home's owner, while the server runs. It is the same router; what
//! differs is that the kernel, not a token, says who is at the other end.

use std::{io, os::unix::fs::PermissionsExt as _, path::Path};

use tokio::net::{UnixListener, UnixStream};

/// Listens at a path, for the owner alone. A socket left behind by a server that was killed is replaced;
/// the caller holds the home's lock, so no other server uses it.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Whether the other end is the user this server runs as, or root.
pub fn is_owner(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
