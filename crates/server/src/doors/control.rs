//! The control socket, by which the command line reaches a running server as the home's owner. Requests pass the same
//! router as those from the network.
//!
//! The kernel (`SO_PEERCRED`) names the peer's user, which is not enough: where Landlock is the only isolation, agents run
//! as the server's user, and Landlock does not keep a process from connecting to a socket. So a client also proves that
//! it can read the home, which no sandbox can: its first line is a secret from a file there, made anew at every start.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_home::{HomeDir, safe_fs};
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener, UntrustedStream};
use oubliette_protocol::Result;
use oubliette_store::{AuditEntry, AuditPrincipal};
use secrecy::ExposeSecret as _;
use subtle::ConstantTimeEq as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::Semaphore,
};

use crate::{
    app::App,
    auth::{
        rate_limit::RateLimiter,
        secret::{self, SecretHash},
    },
};

/// The length of the secret's line, in bytes: 256 bits in base64 without padding, and a newline.
const SECRET_LINE_BYTES: usize = 44;
/// How long a client may take to send the secret.
const SECRET_TIMEOUT: Duration = Duration::from_secs(2);
/// Clients that have not sent the secret yet; further ones are closed.
const MAX_UNPROVEN: usize = 256;

/// The bound control socket and what its clients have to prove.
pub(crate) struct ControlSocket {
    /// Where connections come in.
    pub(crate) listener: UntrustedListener,
    /// Checks each of them.
    pub(crate) gate: Arc<ControlGate>,
}

/// Decides which connections to the control socket are the owner's.
pub(crate) struct ControlGate {
    secret: SecretHash,
    unproven: Semaphore,
    /// Refusals that are reported: a process that retries without end must not fill the audit log.
    reports: RateLimiter<()>,
}

/// Listens on a socket that only the server's user can open, and writes the secret for its clients. A socket left by a
/// killed server is replaced; this process must hold the home's lock, so that no other server uses it.
pub(crate) fn listen(home: &HomeDir) -> Result<ControlSocket> {
    // Written before the socket is listened on, so that a client that can connect finds the secret of this start.
    let (text, secret) = secret::new_cookie();
    let line = format!("{}\n", text.expose_secret());
    safe_fs::write_atomic(&home.control_secret_path(), line.as_bytes(), 0o600)?;
    let socket = home.control_socket();
    // Whoever has not sent the secret is not to be trusted: see the top of this file.
    let (passed, worker) = (PassedDescriptors::Refused, DescriptorWorker::default());
    let listener = UntrustedListener::bind(&socket, passed, worker)
        .map_err(|e| safe_fs::io_error("listen on", &socket, e))?;
    let gate = ControlGate {
        secret,
        unproven: Semaphore::new(MAX_UNPROVEN),
        reports: RateLimiter::new(1.0 / 6.0, 10.0),
    };
    Ok(ControlSocket {
        listener,
        gate: Arc::new(gate),
    })
}

/// Removes the socket and its secret, when the server stops.
pub(crate) fn remove(home: &HomeDir) {
    let _ = std::fs::remove_file(home.control_socket());
    let _ = std::fs::remove_file(home.control_secret_path());
}

/// Connects to the control socket of a running server and proves to be the home's owner.
pub(crate) async fn connect(home: &HomeDir) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(home.control_socket()).await?;
    let line = std::fs::read(home.control_secret_path())?;
    stream.write_all(&line).await?;
    Ok(stream)
}

/// Why a connection was refused.
#[derive(Debug, Clone, Copy)]
enum ControlRefusal {
    OtherUser,
    NoSecret,
    WrongSecret,
    TooMany,
}

impl ControlRefusal {
    fn as_str(self) -> &'static str {
        match self {
            ControlRefusal::OtherUser => "the peer is neither the server's user nor root",
            ControlRefusal::NoSecret => "the peer did not send the secret of run/control.secret",
            ControlRefusal::WrongSecret => "the peer sent a wrong secret",
            ControlRefusal::TooMany => "too many peers have not sent the secret yet",
        }
    }
}

impl ControlGate {
    /// Reads the secret from a new connection. Returns whether it is the owner's; a refusal is logged and audited.
    pub(crate) async fn admit(&self, app: &App, stream: &mut UntrustedStream) -> bool {
        match self.check(stream).await {
            Ok(admitted) => admitted,
            Err(refusal) => {
                self.report(app, stream, refusal).await;
                false
            }
        }
    }

    async fn check(&self, stream: &mut UntrustedStream) -> Result<bool, ControlRefusal> {
        let own = rustix::process::geteuid().as_raw();
        let is_owner = |peer: u32| peer == own || peer == 0;
        if !stream.socket().peer_uid().is_some_and(is_owner) {
            return Err(ControlRefusal::OtherUser);
        }
        let _unproven = self.unproven.try_acquire().map_err(|_| ControlRefusal::TooMany)?;
        let mut line = [0; SECRET_LINE_BYTES];
        let mut read = 0;
        let reading = async {
            while read < line.len() {
                match stream.read(&mut line[read..]).await {
                    Ok(0) | Err(_) => break,
                    Ok(n) => read += n,
                }
            }
        };
        let _ = tokio::time::timeout(SECRET_TIMEOUT, reading).await;
        match read {
            // Commands look in this way whether a server runs.
            0 => Ok(false),
            SECRET_LINE_BYTES => match self.is_secret(&line) {
                true => Ok(true),
                false => Err(ControlRefusal::WrongSecret),
            },
            _ => Err(ControlRefusal::NoSecret),
        }
    }

    fn is_secret(&self, line: &[u8; SECRET_LINE_BYTES]) -> bool {
        let [text @ .., b'\n'] = line else { return false };
        let Ok(text) = std::str::from_utf8(text) else {
            return false;
        };
        secret::hash(text).ct_eq(&self.secret).into()
    }

    async fn report(&self, app: &App, stream: &UntrustedStream, refusal: ControlRefusal) {
        if self.reports.take(&(), Instant::now()).is_err() {
            return;
        }
        let (uid, pid) = (stream.socket().peer_uid(), stream.socket().peer_pid());
        let why = refusal.as_str();
        tracing::warn!(?uid, ?pid, why, "connection to the control socket refused");
        let entry = AuditEntry {
            principal: AuditPrincipal::Anonymous,
            session_id: None,
            action: "control_connect".into(),
            target: Some(format!(
                "user {}, process {}",
                uid.map_or_else(|| "?".into(), |uid| uid.to_string()),
                pid.map_or_else(|| "?".into(), |pid| pid.to_string())
            )),
            outcome: "permission_denied".into(),
            project_id: None,
            detail: None,
        };
        if let Err(error) = app.store.audit_append_soon(entry).await {
            tracing::error!(error = %error.for_log(), "appending an audit entry failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As on a kernel that cannot refuse descriptors: the two ends are a pair, not accepted from the listener.
    #[tokio::test]
    async fn the_secret_with_a_descriptor_is_not_admitted() {
        use std::{io::IoSlice, mem::MaybeUninit, os::fd::AsFd as _};
        let (text, secret) = secret::new_cookie();
        let gate = ControlGate {
            secret,
            unproven: Semaphore::new(1),
            reports: RateLimiter::new(1.0, 1.0),
        };
        let line = format!("{}\n", text.expose_secret());
        for (passed, admitted) in [(0, true), (1, false)] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut stream = UntrustedStream::from_connected(ours, DescriptorWorker::default()).unwrap();
            let (_reader, writer) = io::pipe().unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            let descriptors = &[writer.as_fd()][..passed];
            control.push(rustix::net::SendAncillaryMessage::ScmRights(descriptors));
            let flags = rustix::net::SendFlags::empty();
            rustix::net::sendmsg(&theirs, &[IoSlice::new(line.as_bytes())], &mut control, flags).unwrap();
            assert_eq!(
                gate.check(&mut stream).await.unwrap(),
                admitted,
                "{passed} passed"
            );
        }
    }

    #[test]
    fn only_the_secret_of_this_start_is_accepted() {
        let (text, secret) = secret::new_cookie();
        let gate = ControlGate {
            secret,
            unproven: Semaphore::new(1),
            reports: RateLimiter::new(1.0, 1.0),
        };
        let line: [u8; SECRET_LINE_BYTES] = format!("{}\n", text.expose_secret())
            .into_bytes()
            .try_into()
            .unwrap();
        assert!(gate.is_secret(&line));
        let mut wrong = line;
        wrong[0] ^= 1;
        assert!(!gate.is_secret(&wrong));
        let mut unended = line;
        unended[SECRET_LINE_BYTES - 1] = b'x';
        assert!(!gate.is_secret(&unended));
        assert!(!gate.is_secret(&[0xff; SECRET_LINE_BYTES]));
    }
}
