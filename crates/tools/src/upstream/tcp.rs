//! MCP over TCP: one JSON-RPC message a line.

use std::sync::Arc;

use tokio::net::TcpStream;

use super::{
    fault::UpstreamFault,
    lines::{LineReader, LineWriter},
    traffic::TrafficFilter,
    wire::UpstreamWire,
};

/// Connects to `host:port`.
pub(super) async fn connect(
    endpoint: &str,
    traffic: Arc<TrafficFilter>,
) -> Result<UpstreamWire, UpstreamFault> {
    let stream = TcpStream::connect(endpoint)
        .await
        .map_err(|error| UpstreamFault::new(format!("cannot connect to {endpoint}: {error}")))?;
    // A request is one small write that a caller waits for: Nagle's algorithm would delay it.
    let _ = stream.set_nodelay(true);
    let (read, write) = stream.into_split();
    Ok(UpstreamWire::new(
        LineReader::new(read, &traffic.buffers),
        LineWriter(write),
        traffic,
    ))
}
