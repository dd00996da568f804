//! The relay socket of one session and the socket over which a client hands off its stdin and stdout. Both are
//! bound as long as the session is in memory.
//!
//! A connection is identified by the socket it came over: whoever can connect acts as the session. With a
//! mount namespace only this session's sandbox sees the socket. Without one (Landlock cannot hide a Unix
//! socket), the sandbox driver says whether the peer is a process of a sandbox that was given the socket.

use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use oubliette_egress::SandboxListener;
use oubliette_home::HomeDir;
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener, UntrustedSocket};
use oubliette_protocol::{ByteBudget, Error, Result, SessionId, relay::HANDOFF_SOCKET_NAME};
use oubliette_sandbox::SandboxDriver;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    ports::{RelayDoor, SessionDeps},
    shown_tools::ShownTools,
};

/// The file name of the relay socket in the session's socket directory.
const RELAY_SOCKET_NAME: &str = "relay.sock";

/// The bound sockets of one session. Dropping it stops listening; [`RelaySocket::remove`] also removes the files.
pub(crate) struct RelaySocket {
    dir: PathBuf,
    descriptors: DescriptorWorker,
    _listening: DropGuard,
}

/// The host path of a session's relay socket.
pub(crate) fn path(home: &HomeDir, session: &SessionId) -> PathBuf {
    home.socket_dir(session).join(RELAY_SOCKET_NAME)
}

impl RelaySocket {
    pub(crate) fn bind(
        deps: &SessionDeps,
        session: &SessionId,
        buffers: &ByteBudget,
        shown_tools: &Arc<ShownTools>,
    ) -> Result<Self> {
        let dir = deps.home.create_socket_dir(session)?;
        let stop = CancellationToken::new();
        let descriptors = DescriptorWorker::default();
        for (name, what, passed) in [
            (RELAY_SOCKET_NAME, SocketKind::Relay, PassedDescriptors::Refused),
            (
                HANDOFF_SOCKET_NAME,
                SocketKind::Handoff,
                PassedDescriptors::Expected,
            ),
        ] {
            let listening = SocketListener {
                socket: SessionSocket::bind(deps, session, dir.join(name), passed, &descriptors)?,
                kind: what,
                door: deps.door.clone(),
                buffers: buffers.clone(),
                shown_tools: shown_tools.clone(),
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
            descriptors,
            _listening: stop.drop_guard(),
        })
    }

    /// The thread that closes what comes from the session's sandboxes.
    pub(crate) fn descriptors(&self) -> &DescriptorWorker {
        &self.descriptors
    }

    /// The session's socket directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Stops listening and removes the socket directory.
    pub(crate) fn remove(self) {
        if let Err(error) = oubliette_os::remove_tree_blocking(&self.dir) {
            tracing::debug!(%error, dir = %self.dir.display(), "removing a socket directory failed");
        }
    }
}

/// A bound socket of a session, which only processes of sandboxes that were given it may use.
pub(crate) struct SessionSocket {
    listener: UntrustedListener,
    peers: SocketPeerCheck,
}

struct SocketPeerCheck {
    session: SessionId,
    path: PathBuf,
    sandbox: Arc<dyn SandboxDriver>,
    /// Connections refused so far.
    refused: AtomicU64,
}

impl SessionSocket {
    /// Binds a socket that only its owner may connect to (mode 0600), replacing a leftover file.
    pub(crate) fn bind(
        deps: &SessionDeps,
        session: &SessionId,
        path: PathBuf,
        passed: PassedDescriptors,
        descriptors: &DescriptorWorker,
    ) -> Result<Self> {
        Ok(Self {
            listener: UntrustedListener::bind(&path, passed, descriptors.clone()).map_err(Error::internal)?,
            peers: SocketPeerCheck {
                session: session.clone(),
                path,
                sandbox: deps.sandbox.clone(),
                refused: AtomicU64::new(0),
            },
        })
    }

    /// The same socket, to be served by the model gateway or the proxy.
    pub(crate) fn into_egress(self) -> SandboxListener {
        let peers = self.peers;
        SandboxListener::new(self.listener, move |socket| peers.admits(socket))
    }
}

impl SocketPeerCheck {
    fn admits(&self, socket: &UntrustedSocket) -> bool {
        if self.sandbox.may_connect(&self.path, socket.as_fd()) {
            return true;
        }
        // Fewer and fewer lines: whoever tries without end must not fill the log.
        let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if refused.is_power_of_two() {
            let peer = socket.peer_pid();
            tracing::warn!(
                session = %self.session,
                socket = %self.path.display(),
                ?peer,
                refused,
                "connection refused: the peer is not a process of a sandbox that was given this socket"
            );
        }
        false
    }
}

/// The protocol spoken on a socket.
#[derive(Debug, Clone, Copy)]
enum SocketKind {
    Relay,
    Handoff,
}

struct SocketListener {
    socket: SessionSocket,
    kind: SocketKind,
    door: Arc<dyn RelayDoor>,
    buffers: ByteBudget,
    shown_tools: Arc<ShownTools>,
}

impl SocketListener {
    async fn serve(self) {
        loop {
            match self.socket.listener.accept().await {
                Ok(socket) => self.accept(socket),
                Err(error) => {
                    // Usually out of file descriptors: wait until some are closed instead of spinning.
                    tracing::warn!(session = %self.socket.peers.session, %error, "accepting a relay connection failed");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn accept(&self, socket: UntrustedSocket) {
        let peers = &self.socket.peers;
        if !peers.admits(&socket) {
            return;
        }
        match self.kind {
            SocketKind::Relay => {
                self.shown_tools.note_connected();
                self.door
                    .accept(peers.session.clone(), socket, self.buffers.clone());
            }
            SocketKind::Handoff => self.door.accept_handoff(peers.session.clone(), socket),
        }
    }
}
