//! The first line of each end on a connection.
//!
//! A stage comes with its token the first time, and from then on with the secret it was given in exchange. A token names
//! its sandbox and is good once: whoever comes with one that was used, or with that of another sandbox, is refused.

use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The version of the protocol. Both ends are of one release, so it is never negotiated.
pub(super) const VERSION: u32 = 1;
/// Maximum length of a stage's line.
pub(super) const MAX_HELLO_BYTES: usize = 1024;
/// Maximum length of the server's line, which lists sockets.
pub(super) const MAX_WELCOME_BYTES: usize = 64 * 1024;
/// How long an end waits for the other's line.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// What a stage says.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StageHello {
    pub(super) version: u32,
    /// The sandbox it says it is.
    pub(super) stage: String,
    pub(super) credential: StageCredential,
    /// What came of trying the port that should be closed, where the stage was told to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) closed_port: Option<ClosedPort>,
}

/// Whether a stage reached a port of the server that its network should not let it reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClosedPort {
    /// It did: nothing restricts its network.
    Reached,
    /// It did not.
    Unreached,
}

/// How a stage proves which sandbox it is.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum StageCredential {
    /// The one-time token; the first connection.
    Token(String),
    /// The secret of an earlier welcome; every other connection.
    Resume {
        secret: String,
        /// How many numbered frames it has received.
        received: u64,
    },
}

/// What the server says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ServerHello {
    Welcome(StageWelcome),
    /// It may not come again.
    Refused(String),
}

/// The answer to a stage that is let in.
#[derive(Serialize, Deserialize)]
pub(super) struct StageWelcome {
    /// For the next connection.
    pub(super) secret: String,
    /// How many numbered frames the server has received.
    pub(super) received: u64,
    /// How long a cut connection may take to be made again.
    pub(super) grace_ms: u64,
    /// The sockets to listen on, as seen inside, in the order of their numbers.
    pub(super) sockets: Vec<String>,
}

/// A token in the form in which a stage gets it: the sandbox it is for, and a secret.
pub(super) fn split_token(text: &str) -> Option<(&str, &str)> {
    text.trim_end().split_once('.')
}

/// Writes a line of JSON.
pub(super) async fn send(to: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let written = async {
        to.write_all(&line).await?;
        to.flush().await
    };
    tokio::time::timeout(TIMEOUT, written)
        .await
        .map_err(|_| io::ErrorKind::TimedOut)?
}

/// Reads a line of JSON of at most `limit` bytes, and not a byte of what follows it.
pub(super) async fn receive<T: serde::de::DeserializeOwned>(
    from: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> io::Result<T> {
    let line = async {
        let mut line = Vec::new();
        // Byte by byte: what follows belongs to the link.
        loop {
            match from.read_u8().await? {
                b'\n' => return Ok(line),
                _ if line.len() >= limit => {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "the first line is too long",
                    ));
                }
                byte => line.push(byte),
            }
        }
    };
    let line = tokio::time::timeout(TIMEOUT, line)
        .await
        .map_err(|_| io::ErrorKind::TimedOut)??;
    Ok(serde_json::from_slice(&line)?)
}
