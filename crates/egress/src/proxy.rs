//! The HTTP proxy of agents with `network: "proxy"`.
//!
//! `CONNECT host:port` and `GET http://host/…`. The proxy resolves the name itself, judges every
//! address it finds, and connects to one it has judged: a name that changes its mind in between
//! (DNS rebinding) changes nothing.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Empty};
use hyper::{body::Incoming, client, server::conn::http1, service::service_fn, upgrade::OnUpgrade};
use hyper_util::rt::{TokioIo, TokioTimer};
use oubliette_protocol::Result;
use tokio::{
    net::{TcpStream, UnixListener, UnixStream},
    task::AbortHandle,
};
use tokio_util::sync::CancellationToken;

use crate::{
    ProxyLimits,
    allow::Allow,
    answer::{Body, Refusal},
    connections, headers,
    tunnel::{Pulse, Watched},
};

/// The proxy, shared by every session.
#[derive(Debug)]
pub struct EgressProxy {
    allow: Allow,
    limits: ProxyLimits,
}

/// A tunnel that begins when the answer to its `CONNECT` has been sent.
struct Tunnel {
    client: OnUpgrade,
    server: Watched,
    pulse: Pulse,
}

/// Ends a task with the thing that needs it.
struct Ends(AbortHandle);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl EgressProxy {
    /// `allow`: hosts, `host:port`, `*.suffix` and CIDR blocks that may be reached although they are
    /// private or on a port that is not the web's.
    pub fn new(allow: Vec<String>, limits: ProxyLimits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            allow: Allow::parse(&allow)?,
            limits,
        }))
    }

    /// Serves one session's socket until `cancel`.
    pub async fn serve(self: Arc<Self>, listener: UnixListener, cancel: CancellationToken) {
        let most = self.limits.connections;
        connections::serve(listener, most, cancel, |stream| self.clone().connection(stream)).await;
    }

    async fn connection(self: Arc<Self>, stream: UnixStream) {
        let begun: Arc<Mutex<Option<Tunnel>>> = Arc::default();
        let (proxy, slot) = (self.clone(), begun.clone());
        let service = service_fn(move |request| {
            let (proxy, slot) = (proxy.clone(), slot.clone());
            async move { Ok::<_, Infallible>(proxy.answer(request, &slot).await) }
        });
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head)
            .max_buf_size(self.limits.head_bytes.max(8 << 10))
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        if let Err(error) = serving.await {
            tracing::debug!(%error, "a sandbox's connection to the proxy broke off");
        }
        // In this task, so that the tunnel counts as this connection and ends with the session.
        let tunnel = begun.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(tunnel) = tunnel {
            self.carry(tunnel).await;
        }
    }

    async fn carry(
        &self,
        Tunnel {
            client,
            mut server,
            pulse,
        }: Tunnel,
    ) {
        let Ok(client) = client.await else { return };
        let mut client = TokioIo::new(client);
        tokio::select! {
            _done = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            () = pulse.ended(self.limits.idle, self.limits.total) => {}
        }
    }

    async fn answer(&self, request: Request<Incoming>, slot: &Mutex<Option<Tunnel>>) -> Response<Body> {
        let answered = if request.method() == Method::CONNECT {
            self.connect(request, slot).await
        } else {
            self.forward(request).await
        };
        answered.unwrap_or_else(|refusal| refusal.response())
    }

    async fn connect(
        &self,
        mut request: Request<Incoming>,
        slot: &Mutex<Option<Tunnel>>,
    ) -> std::result::Result<Response<Body>, Refusal> {
        let Some(port) = request.uri().port_u16() else {
            return Err(bad("CONNECT wants host:port"));
        };
        let host = host_of(request.uri())?;
        let (server, pulse) = Watched::new(self.reach(&host, port).await?);
        let client = hyper::upgrade::on(&mut request);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(Tunnel {
            client,
            server,
            pulse,
        });
        Ok(Response::new(
            Empty::new().map_err(|never| match never {}).boxed_unsync(),
        ))
    }

    async fn forward(&self, request: Request<Incoming>) -> std::result::Result<Response<Body>, Refusal> {
        match request.uri().scheme_str() {
            Some("http") => {}
            Some(other) => return Err(bad(format!("use CONNECT for {other}"))),
            None => {
                return Err(bad(
                    "this is an HTTP proxy: ask for http://host/… or CONNECT host:port",
                ));
            }
        }
        let host = host_of(request.uri())?;
        let port = request.uri().port_u16().unwrap_or(80);
        let (stream, pulse) = Watched::new(self.reach(&host, port).await?);
        let (mut sender, connection) = client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| broken(&host, &e))?;
        let (idle, total) = (self.limits.idle, self.limits.total);
        let driver = tokio::spawn(async move {
            tokio::select! {
                _done = connection => {}
                () = pulse.ended(idle, total) => {}
            }
        });
        let driver = Ends(driver.abort_handle());

        let (mut parts, body) = request.into_parts();
        let host_header = parts
            .uri
            .authority()
            .and_then(|a| HeaderValue::from_str(a.as_str()).ok());
        parts.uri = Uri::from(
            parts
                .uri
                .path_and_query()
                .cloned()
                .unwrap_or(PathAndQuery::from_static("/")),
        );
        parts.headers = headers::without_hops(&parts.headers);
        if let Some(value) = host_header {
            parts.headers.insert(header::HOST, value);
        }
        let response = sender
            .send_request(Request::from_parts(parts, body))
            .await
            .map_err(|e| broken(&host, &e))?;
        let (mut parts, body) = response.into_parts();
        parts.headers = headers::without_hops(&parts.headers);
        // The driver lives as long as the body it feeds.
        let body = body.map_err(move |error| {
            let _alive = &driver;
            error.into()
        });
        Ok(Response::from_parts(parts, body.boxed_unsync()))
    }

    /// Resolves, judges, connects.
    async fn reach(&self, host: &str, port: u16) -> std::result::Result<TcpStream, Refusal> {
        let found: Vec<SocketAddr> =
            match tokio::time::timeout(self.limits.resolve, tokio::net::lookup_host((host, port))).await {
                Ok(Ok(found)) => found.collect(),
                Ok(Err(_)) | Err(_) => Vec::new(),
            };
        if found.is_empty() {
            return Err(gateway(format!("there is no address for {host}")));
        }
        self.allow.check(host, port, &found)?;
        let mut last = None;
        for address in found.into_iter().take(4) {
            match tokio::time::timeout(self.limits.connect, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    let _slower = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Ok(Err(error)) => last = Some(error.to_string()),
                Err(_) => last = Some(format!("no answer within {}", seconds(self.limits.connect))),
            }
        }
        Err(gateway(format!(
            "cannot connect to {host}:{port}: {}",
            last.unwrap_or_default()
        )))
    }
}

/// The host of a request's target, as names are compared: in lower case, without brackets or a dot
/// at its end.
fn host_of(uri: &Uri) -> std::result::Result<String, Refusal> {
    let authority = uri.authority().ok_or_else(|| bad("no host is named"))?;
    if authority.as_str().contains('@') {
        return Err(bad("no user name belongs there"));
    }
    let host = authority
        .host()
        .trim_matches(['[', ']'])
        .trim_end_matches('.')
        .to_ascii_lowercase();
    if host.is_empty() || host.len() > 253 {
        return Err(bad("no host is named"));
    }
    Ok(host)
}

fn bad(message: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, "invalid_argument", message)
}

fn gateway(message: String) -> Refusal {
    Refusal::new(StatusCode::BAD_GATEWAY, "unavailable", message)
}

fn broken(host: &str, error: &hyper::Error) -> Refusal {
    gateway(format!("{host} broke the connection off: {error}"))
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}
