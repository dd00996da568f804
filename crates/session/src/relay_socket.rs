//! The relay socket of one session, and the one streams are lent over, bound as long as the session is in memory.
//!
//! The socket is the identity: whoever can connect is the session, so who can connect is what matters.
//! In a mount namespace only this session's sandbox sees it. Without one (Landlock alone cannot hide a
//! Unix socket), the peer must be a process of this session's sandbox.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use oubliette_home::Home;
use oubliette_protocol::{Error, Result, SessionId, relay::STDIO_SOCKET_NAME};
use oubliette_sandbox::Level;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::ports::RelayDoor;

/// The socket's name in the session's socket directory.
const NAME: &str = "relay.sock";

/// A bound relay socket. Dropping it stops listening; [`RelaySocket::remove`] takes the files away.
pub(crate) struct RelaySocket {
    dir: PathBuf,
    /// The agent's process on the host; 0 while there is none.
    agent: Arc<AtomicU32>,
    _listening: DropGuard,
}

/// The host path of a session's relay socket.
pub(crate) fn path(home: &Home, session: &SessionId) -> PathBuf {
    home.socket_dir(session).join(NAME)
}

impl RelaySocket {
    pub(crate) fn bind(
        home: &Home,
        session: &SessionId,
        door: Arc<dyn RelayDoor>,
        level: Level,
    ) -> Result<Self> {
        let dir = home.create_socket_dir(session)?;
        let stop = CancellationToken::new();
        let agent = Arc::new(AtomicU32::new(0));
        for (name, what) in [(NAME, What::Relay), (STDIO_SOCKET_NAME, What::Stdio)] {
            let listening = Listening {
                listener: bind(&dir.join(name))?,
                what,
                session: session.clone(),
                door: door.clone(),
                level,
                agent: agent.clone(),
            };
            let stop = stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = listening.serve() => {}
                }
            });
        }
        Ok(Self {
            dir,
            agent,
            _listening: stop.drop_guard(),
        })
    }

    /// Where the session's sockets are.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the process is noted whose tree may connect, for when walls alone do not see to that.
    pub(crate) fn admission(&self) -> Arc<AtomicU32> {
        self.agent.clone()
    }

    /// Stops listening and takes the directory away.
    pub(crate) fn remove(self) {
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            tracing::debug!(%error, dir = %self.dir.display(), "a socket directory was not removed");
        }
    }
}

/// Binds a socket that its owner alone may connect to, in place of a leftover.
pub(crate) fn bind(path: &Path) -> Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(Error::internal(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(Error::internal)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(Error::internal)?;
    Ok(listener)
}

/// What a socket is for.
#[derive(Debug, Clone, Copy)]
enum What {
    Relay,
    Stdio,
}

struct Listening {
    listener: UnixListener,
    what: What,
    session: SessionId,
    door: Arc<dyn RelayDoor>,
    level: Level,
    agent: Arc<AtomicU32>,
}

impl Listening {
    async fn serve(self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => self.accept(stream),
                Err(error) => {
                    // Out of descriptors: wait for some to come back instead of spinning.
                    tracing::warn!(session = %self.session, %error, "a relay connection could not be accepted");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn accept(&self, stream: UnixStream) {
        let peer = stream
            .peer_cred()
            .ok()
            .and_then(|cred| cred.pid())
            .and_then(|pid| u32::try_from(pid).ok());
        let ours = || peer.is_some_and(|pid| descends_from(pid, self.agent.load(Ordering::Relaxed)));
        if self.level == Level::Landlock && !ours() {
            let session = &self.session;
            tracing::warn!(%session, ?peer, "a process outside the session's sandbox tried its relay socket");
            return;
        }
        match self.what {
            What::Relay => self.door.accept(self.session.clone(), stream),
            What::Stdio => self.door.borrow(self.session.clone(), stream),
        }
    }
}

/// Whether a process is `ancestor` or below it.
fn descends_from(pid: u32, ancestor: u32) -> bool {
    let mut at = pid;
    // Deeper than any real tree; a loop cannot happen, but /proc is read while it changes.
    for _ in 0..1_000 {
        if at == ancestor && ancestor != 0 {
            return true;
        }
        match parent_of(at) {
            Some(parent) if parent > 1 => at = parent,
            _ => return false,
        }
    }
    false
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything: what follows the last bracket is safe to split.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_descends_from_its_parents_and_not_from_strangers() {
        let me = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(descends_from(child.id(), me));
        assert!(descends_from(me, me));
        assert!(!descends_from(me, child.id()));
        assert!(!descends_from(me, 0));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
