//! The engine's API, with errors that say what to do.

use std::time::Duration;

use bollard::{API_DEFAULT_VERSION, Docker, errors::Error};
use tokio::sync::OnceCell;

use crate::driver::SandboxError;

/// How long the engine may take to answer a request, in seconds.
const TIMEOUT_SECONDS: u64 = 120;
/// How long it may take to answer the first one.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);

/// A container engine on this machine.
#[derive(Debug)]
pub(super) struct Engine {
    host: String,
    /// The path of its socket.
    socket: String,
    /// Connected once it answered, with a version of the API that both know.
    client: OnceCell<Docker>,
}

impl Engine {
    pub(super) fn new(host: &str) -> Result<Self, SandboxError> {
        let Some(socket) = host.strip_prefix("unix://").filter(|path| path.starts_with('/')) else {
            return Err(SandboxError::Invalid(format!(
                "sandbox.docker.host: {host:?} is not an engine on this machine; use \"unix:///var/run/docker.sock\" or \
                 another socket. An engine elsewhere does not see the workspaces"
            )));
        };
        Ok(Self {
            host: host.to_owned(),
            socket: socket.to_owned(),
            client: OnceCell::new(),
        })
    }

    /// The engine's address.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// A client of the engine. Each of its requests is a connection of its own.
    pub(super) async fn client(&self) -> Result<&Docker, SandboxError> {
        let connect = async {
            let client = Docker::connect_with_unix(&self.socket, TIMEOUT_SECONDS, API_DEFAULT_VERSION)
                .map_err(|error| self.unreachable(&error))?;
            match tokio::time::timeout(FIRST_TIMEOUT, client.negotiate_version()).await {
                Ok(Ok(client)) => Ok(client),
                Ok(Err(error)) => Err(self.unreachable(&error)),
                Err(_) => Err(SandboxError::Unavailable {
                    reason: format!("the container engine at {} does not answer", self.host),
                    remedy: "Look at its log, or restart it: `systemctl restart docker`.".into(),
                }),
            }
        };
        self.client.get_or_try_init(|| connect).await
    }

    /// Why the engine cannot be reached, and what to do about it.
    fn unreachable(&self, error: &Error) -> SandboxError {
        let (reason, remedy) = match std::os::unix::net::UnixStream::connect(&self.socket) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (
                format!("there is no container engine at {}", self.host),
                "Install and start one: `apt-get install docker.io` and `systemctl start docker`; or name its socket in \
                 [sandbox.docker] host; or set [sandbox] driver = \"local\", which needs none."
                    .to_owned(),
            ),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => (
                format!("this user may not use the container engine at {}", self.host),
                "Add the server's user to the group that owns the socket (`usermod -aG docker USER`) and start the server \
                 again. Whoever may use the engine is root on this machine."
                    .to_owned(),
            ),
            Err(error) => (
                format!("the container engine at {} is down: {error}", self.host),
                "Start it: `systemctl start docker`.".to_owned(),
            ),
            Ok(_) => (
                format!("the container engine at {} answers wrongly: {error}", self.host),
                "Is this the socket of an engine with Docker's API? Name the right one in [sandbox.docker] host."
                    .to_owned(),
            ),
        };
        SandboxError::Unavailable { reason, remedy }
    }

    /// What went wrong in a step, with the engine's own words.
    pub(super) fn failed(&self, step: &str, error: &Error) -> SandboxError {
        match error {
            Error::DockerResponseServerError { message, .. } => SandboxError::setup(step, message.trim()),
            Error::HyperLegacyError { .. } | Error::HyperResponseError { .. } | Error::IOError { .. } => {
                self.unreachable(error)
            }
            _ => SandboxError::setup(step, error),
        }
    }
}

/// Whether the engine says that there is no such thing.
pub(super) fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::DockerResponseServerError { status_code: 404, .. })
}
