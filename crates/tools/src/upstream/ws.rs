//! MCP over WebSocket: one message a text frame, subprotocol `mcp` offered.

use std::sync::Arc;

use async_trait::async_trait;
use futures::{SinkExt, StreamExt, stream::SplitSink, stream::SplitStream};
use http::{HeaderMap, Uri};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error, Message, Utf8Bytes,
        handshake::{client::generate_key, derive_accept_key},
        protocol::{Role, WebSocketConfig},
    },
};

use super::{
    fault::UpstreamFault,
    limits,
    lines::message_too_large,
    tls,
    traffic::TrafficFilter,
    wire::{FrameRead, FrameWrite, ReceivedFrame, UpstreamWire},
    ws_frames::{ChargedFrames, MessageVerdicts},
};

/// A plain or TLS byte stream.
trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}
type ClientWebSocket = WebSocketStream<ChargedFrames<Box<dyn ByteStream>>>;

/// Connects to `ws://…` or `wss://…`.
pub(super) async fn connect(
    endpoint: &str,
    headers: HeaderMap,
    traffic: Arc<TrafficFilter>,
) -> Result<UpstreamWire, UpstreamFault> {
    let broken = |what: String| UpstreamFault::new(format!("cannot connect to {endpoint}: {what}"));
    let uri: Uri = endpoint
        .parse()
        .map_err(|error| broken(format!("invalid URL: {error}")))?;
    let mut stream = connect_stream(&uri).await.map_err(broken)?;
    let rest = upgrade(&mut stream, &uri, &headers).await.map_err(broken)?;

    let config = WebSocketConfig::default()
        .max_message_size(Some(limits::MAX_MESSAGE_BYTES))
        .max_frame_size(Some(limits::MAX_MESSAGE_BYTES));
    let (frames, verdicts) = ChargedFrames::new(stream, rest, &traffic.buffers);
    let socket: ClientWebSocket = WebSocketStream::from_raw_socket(frames, Role::Client, Some(config)).await;
    let (sink, messages) = socket.split();
    Ok(UpstreamWire::new(
        WebSocketReader { messages, verdicts },
        WebSocketWriter(sink),
        traffic,
    ))
}

async fn connect_stream(uri: &Uri) -> Result<Box<dyn ByteStream>, String> {
    let secure = uri.scheme_str() == Some("wss");
    let host = uri
        .host()
        .ok_or("the address names no host")?
        .trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let stream = TcpStream::connect((host, port))
        .await
        .map_err(|error| error.to_string())?;
    let _ = stream.set_nodelay(true);
    if !secure {
        return Ok(Box::new(stream));
    }
    let config = tls::client_config().map_err(|error| error.to_string())?;
    let name = rustls::pki_types::ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await;
    Ok(Box::new(stream.map_err(|error| error.to_string())?))
}

/// Makes the opening handshake (RFC 6455, 4.1); returns the bytes that followed the response.
///
/// It is done here because tungstenite refuses a server that confirms no subprotocol when one was offered, and
/// many servers confirm none.
async fn upgrade(
    stream: &mut (impl ByteStream + ?Sized),
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Vec<u8>, String> {
    /// Headers the handshake sets itself; those of the definition are ignored.
    const HANDSHAKE_HEADERS: [&str; 6] = [
        "host",
        "connection",
        "upgrade",
        "sec-websocket-version",
        "sec-websocket-key",
        "sec-websocket-protocol",
    ];
    let key = generate_key();
    let host = uri.authority().map_or("", |authority| authority.as_str());
    // User information before an @ is no part of the Host header.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Protocol: mcp\r\n"
    )
    .into_bytes();
    for (name, value) in headers
        .iter()
        .filter(|(name, _)| !HANDSHAKE_HEADERS.contains(&name.as_str()))
    {
        request.extend_from_slice(name.as_str().as_bytes());
        request.extend_from_slice(b": ");
        request.extend_from_slice(value.as_bytes());
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    stream
        .write_all(&request)
        .await
        .map_err(|error| error.to_string())?;
    stream.flush().await.map_err(|error| error.to_string())?;

    let (head, rest) = read_response_head(stream).await?;
    check_response(&head, &derive_accept_key(key.as_bytes()))?;
    Ok(rest)
}

async fn read_response_head(stream: &mut (impl ByteStream + ?Sized)) -> Result<(String, Vec<u8>), String> {
    const END: &[u8] = b"\r\n\r\n";
    const MAX_BYTES: usize = 32 * 1024;
    let mut answer = Vec::new();
    loop {
        if let Some(at) = answer.windows(END.len()).position(|bytes| bytes == END) {
            let rest = answer.split_off(at + END.len());
            return Ok((String::from_utf8_lossy(&answer[..at]).into_owned(), rest));
        }
        if answer.len() > MAX_BYTES {
            return Err("its answer to the handshake does not end".into());
        }
        match stream.read_buf(&mut answer).await {
            Ok(0) => return Err("it closed the connection during the handshake".into()),
            Ok(_) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn check_response(head: &str, accept: &str) -> Result<(), String> {
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("101") {
        return Err(format!(
            "it answered the handshake with {:?}",
            super::fault::truncate_error(status)
        ));
    }
    let header = |name: &str| {
        head.split("\r\n").skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.trim().eq_ignore_ascii_case(name).then(|| value.trim())
        })
    };
    if !header("upgrade").is_some_and(|value| value.eq_ignore_ascii_case("websocket")) {
        return Err("it did not switch to WebSocket".into());
    }
    if header("sec-websocket-accept") != Some(accept) {
        return Err("its answer to the handshake is not to our key".into());
    }
    match header("sec-websocket-protocol") {
        None | Some("mcp") => Ok(()),
        Some(other) => Err(format!(
            "it chose the subprotocol {:?}, which was not offered",
            super::fault::truncate_error(other)
        )),
    }
}

struct WebSocketReader {
    messages: SplitStream<ClientWebSocket>,
    verdicts: MessageVerdicts,
}

#[async_trait]
impl FrameRead for WebSocketReader {
    async fn next(&mut self) -> Result<Option<ReceivedFrame>, String> {
        loop {
            match self.messages.next().await {
                None => return Ok(None),
                Some(Ok(message @ (Message::Text(_) | Message::Binary(_)))) => {
                    let frame = match self.verdicts.next_dropped() {
                        Some(dropped) => ReceivedFrame::Dropped(dropped),
                        None => ReceivedFrame::Message(message.into_data()),
                    };
                    return Ok(Some(frame));
                }
                // tungstenite answers pings.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed)) => {
                    return Ok(None);
                }
                Some(Err(Error::Capacity(_))) => return Err(message_too_large()),
                Some(Err(Error::Io(error))) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                    return Ok(None);
                }
                Some(Err(Error::Io(error))) if error.kind() == std::io::ErrorKind::FileTooLarge => {
                    return Err(message_too_large());
                }
                Some(Err(error)) => return Err(format!("its WebSocket broke: {error}")),
            }
        }
    }
}

struct WebSocketWriter(SplitSink<ClientWebSocket, Message>);

#[async_trait]
impl FrameWrite for WebSocketWriter {
    async fn write(&mut self, messages: Vec<Vec<u8>>) -> Result<(), String> {
        let broke = |error: Error| format!("its WebSocket broke: {error}");
        for message in messages {
            let text = Utf8Bytes::try_from(message).map_err(|error| error.to_string())?;
            self.0.feed(Message::Text(text)).await.map_err(broke)?;
        }
        self.0.flush().await.map_err(broke)
    }

    async fn close(&mut self) {
        let _ = self.0.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_complete_response_to_our_key_is_accepted() {
        let good = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nsec-websocket-accept: k";
        assert_eq!(check_response(good, "k"), Ok(()));
        assert_eq!(
            check_response(&format!("{good}\r\nSec-WebSocket-Protocol: mcp"), "k"),
            Ok(())
        );
        for (bad, word) in [
            (good.replace("101", "401"), "401"),
            (good.replace("WebSocket", "h2c"), "switch"),
            (good.replace(": k", ": other"), "key"),
            (format!("{good}\r\nSec-WebSocket-Protocol: soap"), "soap"),
            (String::new(), "answered"),
        ] {
            assert!(check_response(&bad, "k").unwrap_err().contains(word), "{bad}");
        }
    }
}
