//! The HTTP proxy of agents with `network: "proxy"`.
//!
//! It serves `CONNECT host:port` and plain requests such as `GET http://host/…`. The proxy resolves the
//! name itself, checks every address it gets, and connects to one of those: a name that resolves
//! differently later (DNS rebinding) gains nothing.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Empty};
use hyper::{body::Incoming, client, server::conn::http1, service::service_fn, upgrade::OnUpgrade};
use hyper_util::rt::{TokioIo, TokioTimer};
use oubliette_os::UntrustedStream;
use oubliette_protocol::Result;
use tokio::{net::TcpStream, task::AbortHandle};
use tokio_util::sync::CancellationToken;

use crate::{
    ProxyLimits, SandboxListener,
    activity::{ActivityClock, ActivityStream},
    allow_list::EgressAllowList,
    connections, headers,
    proxy_client::{EgressRecord, EgressReport, EgressSink, ProxyClient},
    refusal::{EgressRefusal, ResponseBody},
};

/// The proxy, shared by every session.
#[derive(Debug)]
pub struct EgressProxy {
    allow: ArcSwap<EgressAllowList>,
    reach: ProxyReach,
    limits: ProxyLimits,
}

/// Which targets a proxy reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProxyReach {
    /// Public ones on the web's ports, and those that the list names.
    Public,
    /// Those that the list names and no others.
    Listed,
}

/// Is told of each refused request.
pub type OnRefusal = Arc<dyn Fn(&EgressRefusal) + Send + Sync>;

/// Records nothing.
struct UnrecordedEgress;

impl EgressSink for UnrecordedEgress {
    fn record(&self, _: EgressRecord) {}
}

/// A tunnel that begins once the response to its `CONNECT` has been sent.
struct PendingTunnel {
    client: OnUpgrade,
    server: ActivityStream,
    activity: ActivityClock,
}

/// Aborts a task when dropped.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl EgressProxy {
    /// `allow`: hosts, `host:port`, `*.suffix`, addresses and CIDR blocks that may be reached although they
    /// are private or on another port than 80 and 443.
    pub fn new(allow: Vec<String>, limits: ProxyLimits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            allow: ArcSwap::from_pointee(EgressAllowList::parse(&allow)?),
            reach: ProxyReach::Public,
            limits,
        }))
    }

    /// A proxy that reaches these hosts, on whatever address they have, and no others. `hosts` has the form of `allow`
    /// of [`EgressProxy::new`].
    pub fn only(hosts: Vec<String>, limits: ProxyLimits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            allow: ArcSwap::from_pointee(EgressAllowList::parse(&hosts)?),
            reach: ProxyReach::Listed,
            limits,
        }))
    }

    /// Replaces what may be reached although it is private. Connections that are open stay.
    pub fn set_allow(&self, allow: EgressAllowList) {
        self.allow.store(Arc::new(allow));
    }

    /// Serves a socket until `cancel`, to whatever the proxy allows, unrecorded.
    pub async fn serve(self: Arc<Self>, listener: impl Into<SandboxListener>, cancel: CancellationToken) {
        self.serve_with(listener, cancel, Arc::new(|_| {})).await;
    }

    /// Like [`EgressProxy::serve`], and tells `on_refusal` what is refused, for clients that do not show it.
    pub async fn serve_with(
        self: Arc<Self>,
        listener: impl Into<SandboxListener>,
        cancel: CancellationToken,
        on_refusal: OnRefusal,
    ) {
        let client = ProxyClient::new(Vec::new(), Arc::new(UnrecordedEgress));
        self.serve_connections(listener.into(), cancel, client, on_refusal)
            .await;
    }

    /// Serves the socket of one client until `cancel`: to what its lists allow besides, and recorded.
    pub async fn serve_client(
        self: Arc<Self>,
        listener: impl Into<SandboxListener>,
        cancel: CancellationToken,
        client: Arc<ProxyClient>,
    ) {
        self.serve_connections(listener.into(), cancel, client, Arc::new(|_| {}))
            .await;
    }

    async fn serve_connections(
        self: Arc<Self>,
        listener: SandboxListener,
        cancel: CancellationToken,
        client: Arc<ProxyClient>,
        on_refusal: OnRefusal,
    ) {
        let most = self.limits.connections;
        connections::serve(listener, most, cancel, |stream| {
            self.clone()
                .serve_connection(stream, client.clone(), on_refusal.clone())
        })
        .await;
    }

    async fn serve_connection(
        self: Arc<Self>,
        stream: UntrustedStream,
        client: Arc<ProxyClient>,
        on_refusal: OnRefusal,
    ) {
        let begun: Arc<Mutex<Option<PendingTunnel>>> = Arc::default();
        let (proxy, slot) = (self.clone(), begun.clone());
        let service = service_fn(move |request| {
            let (proxy, slot, client) = (proxy.clone(), slot.clone(), client.clone());
            let on_refusal = on_refusal.clone();
            async move {
                let answered = proxy.handle_request(request, &slot, &client).await;
                Ok::<_, Infallible>(answered.unwrap_or_else(|refusal| {
                    on_refusal(&refusal);
                    refusal.response()
                }))
            }
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
        // The tunnel runs in this task, so that it counts as this connection and ends with the session.
        let tunnel = begun.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(tunnel) = tunnel {
            self.run_tunnel(tunnel).await;
        }
    }

    async fn run_tunnel(
        &self,
        PendingTunnel {
            client,
            mut server,
            activity,
        }: PendingTunnel,
    ) {
        let Ok(client) = client.await else { return };
        let mut client = TokioIo::new(client);
        tokio::select! {
            _done = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            () = activity.wait_idle_or_expired(self.limits.idle, self.limits.total) => {}
        }
    }

    async fn handle_request(
        &self,
        request: Request<Incoming>,
        slot: &Mutex<Option<PendingTunnel>>,
        client: &ProxyClient,
    ) -> std::result::Result<Response<ResponseBody>, EgressRefusal> {
        if request.method() == Method::CONNECT {
            self.handle_connect(request, slot, client).await
        } else {
            self.forward_http(request, client).await
        }
    }

    async fn handle_connect(
        &self,
        mut request: Request<Incoming>,
        slot: &Mutex<Option<PendingTunnel>>,
        client: &ProxyClient,
    ) -> std::result::Result<Response<ResponseBody>, EgressRefusal> {
        let Some(port) = request.uri().port_u16() else {
            return Err(bad_request("CONNECT wants host:port"));
        };
        let host = host_of(request.uri())?;
        let (server, activity) = self.connect(&host, port, client).await?;
        let client = hyper::upgrade::on(&mut request);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(PendingTunnel {
            client,
            server,
            activity,
        });
        Ok(Response::new(
            Empty::new().map_err(|never| match never {}).boxed_unsync(),
        ))
    }

    async fn forward_http(
        &self,
        request: Request<Incoming>,
        client: &ProxyClient,
    ) -> std::result::Result<Response<ResponseBody>, EgressRefusal> {
        match request.uri().scheme_str() {
            Some("http") => {}
            Some(other) => return Err(bad_request(format!("use CONNECT for {other}"))),
            None => {
                return Err(bad_request(
                    "this is an HTTP proxy: ask for http://host/… or CONNECT host:port",
                ));
            }
        }
        let host = host_of(request.uri())?;
        let port = request.uri().port_u16().unwrap_or(80);
        let (stream, activity) = self.connect(&host, port, client).await?;
        let (mut sender, connection) = client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| connection_broken(&host, &e))?;
        let (idle, total) = (self.limits.idle, self.limits.total);
        let driver = tokio::spawn(async move {
            tokio::select! {
                _done = connection => {}
                () = activity.wait_idle_or_expired(idle, total) => {}
            }
        });
        let driver = AbortOnDrop(driver.abort_handle());

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
        parts.headers = headers::without_hop_by_hop(&parts.headers);
        if let Some(value) = host_header {
            parts.headers.insert(header::HOST, value);
        }
        let response = sender
            .send_request(Request::from_parts(parts, body))
            .await
            .map_err(|e| connection_broken(&host, &e))?;
        let (mut parts, body) = response.into_parts();
        parts.headers = headers::without_hop_by_hop(&parts.headers);
        // The task that drives the connection lives as long as the body it feeds.
        let body = body.map_err(move |error| {
            let _alive = &driver;
            error.into()
        });
        Ok(Response::from_parts(parts, body.boxed_unsync()))
    }

    /// Connects to a host if the client may, and begins the connection's report.
    async fn connect(
        &self,
        host: &str,
        port: u16,
        client: &ProxyClient,
    ) -> std::result::Result<(ActivityStream, ActivityClock), EgressRefusal> {
        let mut report = client.report(host, port);
        match self.check_and_connect(host, port, client, &mut report).await {
            Ok(stream) => Ok(ActivityStream::new(stream, report)),
            Err(refusal) => {
                report.record.error = Some(refusal.message.clone());
                Err(refusal)
            }
        }
    }

    /// Checks the client's lists, resolves the name, checks its addresses, and connects to the first of at most four
    /// that answers. The lists come first, because a question to a name
    /// server can itself carry data out of the sandbox.
    async fn check_and_connect(
        &self,
        host: &str,
        port: u16,
        client: &ProxyClient,
        report: &mut EgressReport,
    ) -> std::result::Result<TcpStream, EgressRefusal> {
        if self.reach == ProxyReach::Listed {
            self.allow.load().check_listed(host, port)?;
        }
        let rule = client.check(host, port)?;
        let found: Vec<SocketAddr> =
            match tokio::time::timeout(self.limits.resolve, tokio::net::lookup_host((host, port))).await {
                Ok(Ok(found)) => found.collect(),
                Ok(Err(_)) | Err(_) => Vec::new(),
            };
        if found.is_empty() {
            report.allow(rule);
            return Err(bad_gateway(format!("there is no address for {host}")));
        }
        self.allow.load().check(host, port, &found)?;
        report.allow(rule);
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
        Err(bad_gateway(format!(
            "cannot connect to {host}:{port}: {}",
            last.unwrap_or_default()
        )))
    }
}

/// The host of a request's target in the form names are compared in: lower case, without brackets or
/// a trailing dot.
pub(crate) fn host_of(uri: &Uri) -> std::result::Result<String, EgressRefusal> {
    let authority = uri.authority().ok_or_else(|| bad_request("no host is named"))?;
    if authority.as_str().contains('@') {
        return Err(bad_request("no user name belongs there"));
    }
    let host = authority
        .host()
        .trim_matches(['[', ']'])
        .trim_end_matches('.')
        .to_ascii_lowercase();
    if host.is_empty() || host.len() > 253 {
        return Err(bad_request("no host is named"));
    }
    Ok(host)
}

fn bad_request(message: impl Into<String>) -> EgressRefusal {
    EgressRefusal::new(StatusCode::BAD_REQUEST, "invalid_argument", message)
}

fn bad_gateway(message: String) -> EgressRefusal {
    EgressRefusal::new(StatusCode::BAD_GATEWAY, "unavailable", message)
}

fn connection_broken(host: &str, error: &hyper::Error) -> EgressRefusal {
    bad_gateway(format!("{host} broke the connection off: {error}"))
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}
