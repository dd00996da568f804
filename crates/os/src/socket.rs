//! A Unix socket that only its owner can connect to.

use std::{io, os::unix::fs::PermissionsExt as _, path::Path};

use tokio::net::UnixListener;

/// Listens on a socket of mode 0600, replacing a file that a killed process left in its place. Whoever calls this
/// must know that no running process uses it, and that nobody else can enter the directory: for a moment the socket
/// has the mode that the umask leaves it.
pub fn bind_private_socket(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_private_socket_replaces_a_leftover_and_has_mode_0600() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        drop(bind_private_socket(&path).unwrap());
        assert!(path.exists(), "a dropped listener leaves its file");
        let _again = bind_private_socket(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
