//! Accepts connections and serves HTTP/1.1 on them until the server stops.

use std::{net::SocketAddr, path::Path, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use oubliette_home::HomeDir;
use oubliette_os::UntrustedStream;
use oubliette_protocol::{Error, Result};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt as _;

use super::{
    DoorKind, connection_limit::ConnectionLimit, control::ControlSocket, head_timeout::HeadTimeout,
    lingering_close::LingeringClose,
};
use crate::{app::App, config::TlsFiles};

/// How long a client may take to send the head of a request, from its first byte on.
const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an idle connection is kept open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// Maximum size of a request's head, in bytes. Anybody can send one.
const MAX_HEAD_BYTES: usize = 64 * 1024;
/// What a client over the limit of connections is sent before its connection is closed.
const TOO_MANY_CONNECTIONS: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
/// How long a TLS handshake may take.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long sent data may stay unacknowledged before the kernel closes the connection (`TCP_USER_TIMEOUT`). With
/// keep-alives every ten seconds a client that vanished is noticed within thirty.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(18);

/// How long a port is waited for that the home's killed server may have had: a process that it was just starting has
/// inherited the listening socket, and holds it until it calls exec.
const KILLED_SERVER_PORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often such a port is tried.
const PORT_POLL: Duration = Duration::from_millis(10);

/// Listens on an address, for the server of this home; the error text says what to do about the failure.
pub(crate) async fn bind(address: SocketAddr, home: &HomeDir) -> Result<TcpListener> {
    // A server that stops in order removes its control socket.
    let was_killed = home.control_socket().exists();
    let give_up = tokio::time::Instant::now() + KILLED_SERVER_PORT_TIMEOUT;
    let bound = loop {
        match TcpListener::bind(address).await {
            Err(e)
                if e.kind() == std::io::ErrorKind::AddrInUse
                    && was_killed
                    && tokio::time::Instant::now() < give_up =>
            {
                tokio::time::sleep(PORT_POLL).await;
            }
            bound => break bound,
        }
    };
    bound.map_err(|e| {
        let remedy = match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another program has that port: stop it, or choose another with --listen (or [server] listen)"
            }
            std::io::ErrorKind::PermissionDenied => {
                "ports below 1024 need privileges: choose a higher one with --listen"
            }
            std::io::ErrorKind::AddrNotAvailable => {
                "this machine has no such address: choose another with --listen"
            }
            _ => "choose another address with --listen",
        };
        Error::unavailable(format!("cannot listen on {address}: {e}; {remedy}"))
    })
}

/// Reads certificate and key from their files.
pub(crate) fn load_tls(files: &TlsFiles) -> Result<TlsAcceptor> {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    let bad = |path: &Path, why: String| Error::invalid(format!("{}: {why}", path.display()));
    let certificates = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|e| bad(&files.cert, format!("no certificates could be read ({e})")))?;
    if certificates.is_empty() {
        return Err(bad(&files.cert, "has no certificate in PEM form".into()));
    }
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|e| bad(&files.key, format!("no private key could be read ({e})")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(Error::internal)?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .map_err(|e| bad(&files.cert, format!("certificate and key do not fit: {e}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Accepts TCP connections until `stopping` is cancelled. Open connections are tracked in `open` and finish by
/// themselves.
pub(crate) async fn serve_tcp(
    listener: TcpListener,
    app: Arc<App>,
    limit: Arc<ConnectionLimit>,
    router: Router,
    stopping: CancellationToken,
    open: TaskTracker,
) {
    loop {
        let (stream, from) = tokio::select! {
            () = stopping.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => { pause_after_accept_error(&error).await; continue }
            },
        };
        // For each connection: the certificate may have been read again.
        let tls = app.live.tls.load_full();
        let Some(permit) = limit.admit(from.ip()) else {
            tracing::debug!(peer = %from, "connection refused: there are too many");
            if tls.is_none() {
                // Without waiting: the socket's buffer is empty, and whoever does not read it is not waited for.
                let _ = stream.try_write(TOO_MANY_CONNECTIONS);
            }
            continue;
        };
        set_socket_options(&stream);
        let (router, stopping) = (router.clone(), stopping.clone());
        open.spawn(async move {
            let _permit = permit;
            let door = DoorKind::Network {
                peer: from.ip(),
                tls: tls.is_some(),
            };
            match tls {
                None => serve_connection(stream, door, router, stopping).await,
                Some(tls) => match tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
                    Ok(Ok(stream)) => serve_connection(stream, door, router, stopping).await,
                    Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                    Err(_) => tracing::debug!("TLS handshake timed out"),
                },
            }
        });
    }
}

/// Accepts connections to the control socket until `stopping` is cancelled, from the home's owner only.
pub(crate) async fn serve_control(
    control: ControlSocket,
    app: Arc<App>,
    router: Router,
    stopping: CancellationToken,
    open: TaskTracker,
) {
    loop {
        let mut stream = tokio::select! {
            () = stopping.cancelled() => return,
            accepted = control.listener.accept() => match accepted.and_then(UntrustedStream::new) {
                Ok(stream) => stream,
                Err(error) => { pause_after_accept_error(&error).await; continue }
            },
        };
        let (app, gate) = (app.clone(), control.gate.clone());
        let (router, stopping) = (router.clone(), stopping.clone());
        open.spawn(async move {
            if gate.admit(&app, &mut stream).await {
                drop(app);
                serve_connection(stream, DoorKind::Control, router, stopping).await;
            }
        });
    }
}

/// Waits after `accept` failed, most likely because the process is out of descriptors: trying again at once would
/// fail again and use a whole processor.
async fn pause_after_accept_error(error: &std::io::Error) {
    tracing::warn!(%error, "accepting a connection failed");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

fn set_socket_options(stream: &TcpStream) {
    use rustix::net::sockopt;
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
    let _ = sockopt::set_tcp_user_timeout(stream, TCP_USER_TIMEOUT.as_millis() as u32);
}

/// Serves one connection. When the server stops, the request in progress is finished and no further one is accepted.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    door: DoorKind,
    router: Router,
    stopping: CancellationToken,
) {
    let (stream, requests) = HeadTimeout::new(stream, REQUEST_HEAD_TIMEOUT);
    let (stream, unread_body) = LingeringClose::new(stream);
    let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
        let served = requests.begin();
        let mut request = request.map(|body| axum::body::Body::new(unread_body.watch(body)));
        request.extensions_mut().insert(door);
        let answer = router.clone().oneshot(request);
        let unread_body = unread_body.clone();
        async move {
            let answer = answer.await;
            drop(served);
            answer.map(|mut response| {
                unread_body.announce_close(&mut response);
                response
            })
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::trace!(%error, "connection ended with an error");
    }
}
