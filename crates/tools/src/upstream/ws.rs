//! MCP over WebSocket: one message a text frame, subprotocol `mcp` offered.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
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
    fault::Fault,
    limits,
    lines::too_long,
    tls,
    traffic::Traffic,
    wire::{FrameRead, FrameWrite, Wire},
};

/// A byte stream of either kind.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}
type Socket = WebSocketStream<Box<dyn Stream>>;

/// Connects to `ws://…` or `wss://…`.
pub(super) async fn connect(
    endpoint: &str,
    headers: HeaderMap,
    traffic: Arc<Traffic>,
) -> Result<Wire, Fault> {
    let broken = |what: String| Fault::new(format!("cannot connect to {endpoint}: {what}"));
    let uri: Uri = endpoint
        .parse()
        .map_err(|error| broken(format!("no address: {error}")))?;
    let mut stream = open(&uri).await.map_err(broken)?;
    let rest = greet(&mut stream, &uri, &headers).await.map_err(broken)?;

    let config = WebSocketConfig::default()
        .max_message_size(Some(limits::MESSAGE_BYTES))
        .max_frame_size(Some(limits::MESSAGE_BYTES));
    let socket: Socket = WebSocketStream::from_partially_read(stream, rest, Role::Client, Some(config)).await;
    let (sink, frames) = socket.split();
    Ok(Wire::new(Frames(frames), Sink(sink), traffic))
}

async fn open(uri: &Uri) -> Result<Box<dyn Stream>, String> {
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
    let config = tls::client().map_err(|error| error.to_string())?;
    let name = rustls::pki_types::ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await;
    Ok(Box::new(stream.map_err(|error| error.to_string())?))
}

/// The opening handshake; gives back what came after it.
///
/// It is done here because the library refuses a server that chooses no subprotocol when one was offered,
/// and many servers know of none.
async fn greet(
    stream: &mut (impl Stream + ?Sized),
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Vec<u8>, String> {
    const OWN: [&str; 6] = [
        "host",
        "connection",
        "upgrade",
        "sec-websocket-version",
        "sec-websocket-key",
        "sec-websocket-protocol",
    ];
    let key = generate_key();
    let host = uri.authority().map_or("", |authority| authority.as_str());
    // What stands before an @ is no part of the host.
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Protocol: mcp\r\n"
    )
    .into_bytes();
    for (name, value) in headers.iter().filter(|(name, _)| !OWN.contains(&name.as_str())) {
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

    let (head, rest) = read_head(stream).await?;
    check_answer(&head, &derive_accept_key(key.as_bytes()))?;
    Ok(rest)
}

async fn read_head(stream: &mut (impl Stream + ?Sized)) -> Result<(String, Vec<u8>), String> {
    const END: &[u8] = b"\r\n\r\n";
    const MOST: usize = 32 * 1024;
    let mut answer = Vec::new();
    loop {
        if let Some(at) = answer.windows(END.len()).position(|bytes| bytes == END) {
            let rest = answer.split_off(at + END.len());
            return Ok((String::from_utf8_lossy(&answer[..at]).into_owned(), rest));
        }
        if answer.len() > MOST {
            return Err("its answer to the handshake does not end".into());
        }
        match stream.read_buf(&mut answer).await {
            Ok(0) => return Err("it closed the connection during the handshake".into()),
            Ok(_) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn check_answer(head: &str, accept: &str) -> Result<(), String> {
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("101") {
        return Err(format!(
            "it answered the handshake with {:?}",
            super::fault::bounded(status)
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
            super::fault::bounded(other)
        )),
    }
}

struct Frames(SplitStream<Socket>);

#[async_trait]
impl FrameRead for Frames {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        loop {
            match self.0.next().await {
                None => return Ok(None),
                Some(Ok(Message::Text(text))) => return Ok(Some(text.into())),
                Some(Ok(Message::Binary(bytes))) => return Ok(Some(bytes)),
                // Pings are answered by the library.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed)) => {
                    return Ok(None);
                }
                Some(Err(Error::Capacity(_))) => return Err(too_long()),
                Some(Err(Error::Io(error))) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                    return Ok(None);
                }
                Some(Err(error)) => return Err(format!("its WebSocket broke: {error}")),
            }
        }
    }
}

struct Sink(SplitSink<Socket, Message>);

#[async_trait]
impl FrameWrite for Sink {
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
    fn only_a_whole_answer_to_our_key_is_taken() {
        let good = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nsec-websocket-accept: k";
        assert_eq!(check_answer(good, "k"), Ok(()));
        assert_eq!(
            check_answer(&format!("{good}\r\nSec-WebSocket-Protocol: mcp"), "k"),
            Ok(())
        );
        for (bad, word) in [
            (good.replace("101", "401"), "401"),
            (good.replace("WebSocket", "h2c"), "switch"),
            (good.replace(": k", ": other"), "key"),
            (format!("{good}\r\nSec-WebSocket-Protocol: soap"), "soap"),
            (String::new(), "answered"),
        ] {
            assert!(check_answer(&bad, "k").unwrap_err().contains(word), "{bad}");
        }
    }
}
