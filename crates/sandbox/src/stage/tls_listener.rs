//! Where stages that dial TCP are let in: one listener for all sandboxes of a server.
//!
//! Whoever reaches the port can connect. Until a connection has shown the credential of a stage that is expected, it has a
//! few seconds, one line and a place among a bounded number of others like it; when there are more, the oldest is dropped.
//! A stage says who it is within milliseconds, so connections that only wait do not keep it out.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;

use super::admission::{AdmittedStage, StageAdmission};
use super::handshake::{self, MAX_HELLO_BYTES, ServerHello, StageHello};

/// Maximum number of connections that have not shown who they are.
const MAX_UNKNOWN: usize = 128;
/// How long a connection may take to show it.
const UNKNOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// A TLS listener with a certificate of its own, for stages of this server. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct StageListener {
    shared: Arc<ListenerShared>,
    tasks: [AbortHandle; 2],
}

#[derive(Debug)]
struct ListenerShared {
    address: SocketAddr,
    fingerprint: String,
    /// The port that a stage's network should keep closed.
    closed_port: u16,
    /// The stages that may come, by name.
    expected: Mutex<HashMap<String, ExpectedEntry>>,
}

#[derive(Clone)]
struct ExpectedEntry {
    admission: Arc<StageAdmission>,
    admit: mpsc::Sender<AdmittedStage>,
}

impl std::fmt::Debug for ExpectedEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExpectedEntry")
    }
}

/// A stage that a listener lets in until this is dropped.
pub(super) struct ExpectedStage {
    shared: Arc<ListenerShared>,
    stage: String,
    admitted: Option<mpsc::Receiver<AdmittedStage>>,
}

impl StageListener {
    /// Listens on an address, with a new certificate.
    pub(crate) async fn bind(address: SocketAddr) -> io::Result<Self> {
        let (config, fingerprint) = new_identity().map_err(io::Error::other)?;
        let listener = TcpListener::bind(address).await?;
        let closed = TcpListener::bind(SocketAddr::new(address.ip(), 0)).await?;
        let shared = Arc::new(ListenerShared {
            address: listener.local_addr()?,
            closed_port: closed.local_addr()?.port(),
            fingerprint,
            expected: Mutex::default(),
        });
        let accepting = accept(listener, TlsAcceptor::from(Arc::new(config)), shared.clone());
        Ok(Self {
            shared,
            tasks: [
                tokio::spawn(accepting).abort_handle(),
                tokio::spawn(accept_and_drop(closed)).abort_handle(),
            ],
        })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// A port beside it that only stages reach whose network restricts nothing.
    pub(crate) fn closed_port(&self) -> u16 {
        self.shared.closed_port
    }

    /// The SHA-256 of its certificate, in hexadecimal.
    pub(super) fn fingerprint(&self) -> &str {
        &self.shared.fingerprint
    }

    /// Lets a stage in from now on.
    pub(super) fn expect(&self, admission: Arc<StageAdmission>) -> ExpectedStage {
        let (admit, admitted) = mpsc::channel(1);
        let stage = admission.stage().to_owned();
        let entry = ExpectedEntry { admission, admit };
        self.shared.expected().insert(stage.clone(), entry);
        ExpectedStage {
            shared: self.shared.clone(),
            stage,
            admitted: Some(admitted),
        }
    }
}

impl Drop for StageListener {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl ExpectedStage {
    /// The connections of the stage that are let in. To be taken once.
    pub(super) fn take_admitted(&mut self) -> mpsc::Receiver<AdmittedStage> {
        let closed = || mpsc::channel(1).1;
        self.admitted.take().unwrap_or_else(closed)
    }
}

impl Drop for ExpectedStage {
    fn drop(&mut self) {
        self.shared.expected().remove(&self.stage);
    }
}

impl ListenerShared {
    fn expected(&self) -> MutexGuard<'_, HashMap<String, ExpectedEntry>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks who a connection says it is.
    async fn admit(&self, hello: StageHello) -> Result<(ExpectedEntry, Option<u64>, String), &'static str> {
        let entry = self.expected().get(&hello.stage).cloned();
        let Some(entry) = entry else {
            return Err("there is no such sandbox, or it has ended");
        };
        let checked = entry.admission.check(hello).await;
        if let Err(why) = checked {
            tracing::warn!(stage = entry.admission.stage(), why, "a stage was refused");
        }
        checked.map(|(received, secret)| (entry, received, secret))
    }
}

/// A certificate that nobody vouches for, with its key, and its SHA-256.
fn new_identity() -> Result<(ServerConfig, String), Box<dyn std::error::Error + Send + Sync>> {
    let made = rcgen::generate_simple_self_signed(["oubliette".to_owned()])?;
    let certificate: CertificateDer<'static> = made.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let fingerprint = hex::encode(Sha256::digest(certificate.as_ref()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.into())?;
    // A stage comes again with its secret, not with a ticket.
    config.send_tls13_tickets = 0;
    Ok((config, fingerprint))
}

/// Answers on the port that should be closed, and that is all.
async fn accept_and_drop(listener: TcpListener) {
    loop {
        if listener.accept().await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, shared: Arc<ListenerShared>) {
    let mut unknown: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let connection = match listener.accept().await {
            Ok((connection, _)) => connection,
            Err(error) => {
                tracing::warn!(%error, "accepting a stage's connection failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if unknown.len() >= MAX_UNKNOWN {
            unknown.retain(|task| !task.is_finished());
        }
        if unknown.len() >= MAX_UNKNOWN
            && let Some(oldest) = unknown.pop_front()
        {
            oldest.abort();
        }
        let greeting = greet(connection, tls.clone(), shared.clone());
        let greeting = tokio::spawn(async move {
            // Broken or too slow: dropped.
            let _ = tokio::time::timeout(UNKNOWN_TIMEOUT, greeting).await;
        });
        unknown.push_back(greeting.abort_handle());
    }
}

/// Asks a connection who it is, and hands it over if it is let in.
async fn greet(connection: TcpStream, tls: TlsAcceptor, shared: Arc<ListenerShared>) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let mut connection = tls.accept(connection).await?;
    let hello: StageHello = handshake::receive(&mut connection, MAX_HELLO_BYTES).await?;
    let closed_port = hello.closed_port;
    match shared.admit(hello).await {
        Ok((entry, peer_received, secret)) => {
            let admitted = AdmittedStage {
                connection: Box::new(connection),
                peer_received,
                secret,
                closed_port,
            };
            // Not a part of this task: it is among those that may be dropped, and the token is used up.
            tokio::spawn(async move { entry.admit.send(admitted).await });
            Ok(())
        }
        Err(why) => handshake::send(&mut connection, &ServerHello::Refused(why.into())).await,
    }
}

#[cfg(test)]
mod tests;
