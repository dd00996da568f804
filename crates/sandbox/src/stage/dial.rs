//! How a stage reaches the server.
//!
//! A container on the server's machine has a socket of the server in its directory. One elsewhere dials TCP with TLS. The
//! certificate is the server's own, made when it started, and the stage was given its SHA-256 beside the token: exactly
//! that certificate is accepted, so no authority has to vouch for it, and the token is shown to nobody else.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::handshake::ClosedPort;
use super::{SERVER_NAME, SOCKET_NAME, StageConnection};

/// How long one attempt to connect by TCP may take. Packets that a network policy drops are answered by nobody.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the port that should be closed is tried.
const CLOSED_PORT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Maximum size of the file that says where to dial.
const MAX_FILE_BYTES: usize = 1024;

/// Where a stage dials, as the file in its directory has it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DialAddress {
    /// The server's address and port.
    pub(super) address: SocketAddr,
    /// The SHA-256 of its certificate, in hexadecimal.
    pub(super) sha256: String,
    /// A port of the same address on which the server listens too, and which the stage's network should keep closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) closed_port: Option<u16>,
}

/// The way to the server.
pub(super) enum ServerRoute {
    /// A socket in the stage's directory.
    Socket(PathBuf),
    /// TCP with TLS.
    Tls {
        address: SocketAddr,
        connector: TlsConnector,
        closed_port: Option<u16>,
    },
}

impl ServerRoute {
    /// Reads from the stage's directory which way it is.
    pub(super) fn read(dir: &Path) -> io::Result<Self> {
        let file = match std::fs::read(dir.join(SERVER_NAME)) {
            Ok(file) if file.len() <= MAX_FILE_BYTES => file,
            Ok(_) => return Err(io::Error::other("the file with the server's address is too long")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self::Socket(dir.join(SOCKET_NAME)));
            }
            Err(error) => return Err(error),
        };
        let server: DialAddress = serde_json::from_slice(&file)?;
        Ok(Self::Tls {
            address: server.address,
            closed_port: server.closed_port,
            connector: TlsConnector::from(Arc::new(client_config(&server.sha256)?)),
        })
    }

    /// Connects once.
    pub(super) async fn connect(&self) -> io::Result<Box<dyn StageConnection>> {
        match self {
            Self::Socket(path) => Ok(Box::new(UnixStream::connect(path).await?)),
            Self::Tls {
                address, connector, ..
            } => {
                let connect = async {
                    let connection = TcpStream::connect(address).await?;
                    connection.set_nodelay(true)?;
                    // The name is in no certificate that is looked at, and is not sent.
                    let name = ServerName::from(address.ip());
                    connector.connect(name, connection).await
                };
                match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
                    Ok(Ok(connection)) => Ok(Box::new(connection)),
                    Ok(Err(error)) if is_tls_error(&error) => Err(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        format!(
                            "what answers at {address} is not the server that started this sandbox: {error}"
                        ),
                    )),
                    Ok(Err(error)) => Err(io::Error::new(error.kind(), format!("{address}: {error}"))),
                    Err(_) => Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!(
                            "{address} does not answer: a network policy or a firewall may drop what is sent there"
                        ),
                    )),
                }
            }
        }
    }

    /// Tries the port that should be closed, if there is one.
    pub(super) async fn try_closed_port(&self) -> Option<ClosedPort> {
        let Self::Tls {
            address,
            closed_port: Some(port),
            ..
        } = self
        else {
            return None;
        };
        let closed = SocketAddr::new(address.ip(), *port);
        // Refused or without an answer: a policy does either.
        match tokio::time::timeout(CLOSED_PORT_TIMEOUT, TcpStream::connect(closed)).await {
            Ok(Ok(_)) => Some(ClosedPort::Reached),
            Ok(Err(_)) | Err(_) => Some(ClosedPort::Unreached),
        }
    }

    /// Whether another attempt may succeed where the first one failed with this error. A network can take a moment to be
    /// there for a new container; a mounted socket is there from the beginning.
    pub(super) fn may_retry(&self, error: &io::Error) -> bool {
        match self {
            Self::Socket(_) => false,
            Self::Tls { .. } => error.kind() != io::ErrorKind::PermissionDenied,
        }
    }
}

fn is_tls_error(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|cause| cause.is::<rustls::Error>())
}

/// TLS 1.3 with a server whose certificate has this SHA-256.
pub(super) fn client_config(sha256: &str) -> io::Result<ClientConfig> {
    let fingerprint = parse_fingerprint(sha256)
        .ok_or_else(|| io::Error::other("the fingerprint of the server's certificate is unreadable"))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = PinnedCertificate {
        fingerprint,
        algorithms: provider.signature_verification_algorithms,
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(io::Error::other)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.enable_sni = false;
    // A ticket would let a later connection pass without the certificate.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

fn parse_fingerprint(sha256: &str) -> Option<[u8; 32]> {
    let digits = sha256.as_bytes();
    let mut fingerprint = [0; 32];
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in fingerprint.iter_mut().zip(digits.chunks(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(fingerprint)
}

/// Accepts one certificate and no other. What is signed with its key is checked as for any certificate.
#[derive(Debug)]
struct PinnedCertificate {
    fingerprint: [u8; 32],
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PinnedCertificate {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let found: [u8; 32] = Sha256::digest(end_entity.as_ref()).into();
        match found == self.fingerprint {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    /// Never asked: only TLS 1.3 is spoken.
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
