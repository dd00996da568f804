//! MCP over TCP: one JSON-RPC message a line.

use std::sync::Arc;

use tokio::net::TcpStream;

use super::{
    fault::Fault,
    lines::{LineReader, LineWriter},
    traffic::Traffic,
    wire::Wire,
};

/// Connects to `host:port`.
pub(super) async fn connect(endpoint: &str, traffic: Arc<Traffic>) -> Result<Wire, Fault> {
    let stream = TcpStream::connect(endpoint)
        .await
        .map_err(|error| Fault::new(format!("cannot connect to {endpoint}: {error}")))?;
    // A call is one small line that somebody waits for.
    let _ = stream.set_nodelay(true);
    let (read, write) = stream.into_split();
    Ok(Wire::new(LineReader::new(read), LineWriter(write), traffic))
}
