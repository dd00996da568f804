//! The relay socket of one session and the socket over which a client hands off its stdin and stdout. Both are
//! bound as long as the session is in memory.
//!
//! A connection is identified by the socket it came over: whoever can connect acts as the session. With a
//! mount namespace only this session's sandbox sees the socket. Without one (Landlock cannot hide a Unix
//! socket), the peer must be a process of this session's sandbox.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result, SessionId, relay::HANDOFF_SOCKET_NAME};
use oubliette_sandbox::IsolationLevel;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::ports::RelayDoor;

/// The file name of the relay socket in the session's socket directory.
const RELAY_SOCKET_NAME: &str = "relay.sock";

/// The bound sockets of one session. Dropping it stops listening; [`RelaySocket::remove`] also removes the files.
pub(crate) struct RelaySocket {
    dir: PathBuf,
    /// The agent's process id on the host; 0 while there is none.
    agent_pid: Arc<AtomicU32>,
    _listening: DropGuard,
}

/// The host path of a session's relay socket.
pub(crate) fn path(home: &HomeDir, session: &SessionId) -> PathBuf {
    home.socket_dir(session).join(RELAY_SOCKET_NAME)
}

impl RelaySocket {
    pub(crate) fn bind(
        home: &HomeDir,
        session: &SessionId,
        door: Arc<dyn RelayDoor>,
        level: IsolationLevel,
    ) -> Result<Self> {
        let dir = home.create_socket_dir(session)?;
        let stop = CancellationToken::new();
        let agent = Arc::new(AtomicU32::new(0));
        for (name, what) in [
            (RELAY_SOCKET_NAME, SocketKind::Relay),
            (HANDOFF_SOCKET_NAME, SocketKind::Handoff),
        ] {
            let listening = SocketListener {
                listener: bind(&dir.join(name))?,
                kind: what,
                session: session.clone(),
                door: door.clone(),
                level,
                agent_pid: agent.clone(),
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
            agent_pid: agent,
            _listening: stop.drop_guard(),
        })
    }

    /// The session's socket directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The cell for the agent's process id. Without a mount namespace only this process and its descendants
    /// may connect.
    pub(crate) fn agent_pid(&self) -> Arc<AtomicU32> {
        self.agent_pid.clone()
    }

    /// Stops listening and removes the socket directory.
    pub(crate) fn remove(self) {
        if let Err(error) = std::fs::remove_dir_all(&self.dir) {
            tracing::debug!(%error, dir = %self.dir.display(), "removing a socket directory failed");
        }
    }
}

/// Binds a socket that only its owner may connect to (mode 0600), replacing a leftover file.
pub(crate) fn bind(path: &Path) -> Result<UnixListener> {
    oubliette_os::bind_private_socket(path).map_err(Error::internal)
}

/// The protocol spoken on a socket.
#[derive(Debug, Clone, Copy)]
enum SocketKind {
    Relay,
    Handoff,
}

struct SocketListener {
    listener: UnixListener,
    kind: SocketKind,
    session: SessionId,
    door: Arc<dyn RelayDoor>,
    level: IsolationLevel,
    agent_pid: Arc<AtomicU32>,
}

impl SocketListener {
    async fn serve(self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => self.accept(stream),
                Err(error) => {
                    // Usually out of file descriptors: wait until some are closed instead of spinning.
                    tracing::warn!(session = %self.session, %error, "accepting a relay connection failed");
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
        let ours = || peer.is_some_and(|pid| descends_from(pid, self.agent_pid.load(Ordering::Relaxed)));
        if self.level == IsolationLevel::Landlock && !ours() {
            let session = &self.session;
            tracing::warn!(%session, ?peer, "relay connection refused: the peer is not a process of the session's sandbox");
            return;
        }
        match self.kind {
            SocketKind::Relay => self.door.accept(self.session.clone(), stream),
            SocketKind::Handoff => self.door.accept_handoff(self.session.clone(), stream),
        }
    }
}

/// Whether a process is `ancestor` or one of its descendants.
fn descends_from(pid: u32, ancestor: u32) -> bool {
    let mut at = pid;
    // More levels than any real process tree has; bounded because /proc changes while it is read.
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
    // The second field, the name in parentheses, may contain spaces and parentheses: split after the last one.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_descends_from_its_ancestors_only() {
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
