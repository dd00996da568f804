//! MCP's streamable HTTP on the sandbox's loopback, for agents that take MCP servers only over HTTP.
//!
//! The listener is inherited as stdin (see [`crate::with_http`]), so that it exists before the agent starts. Every request
//! needs the bearer token that the agent was given with the address. The relay socket is connected with the first MCP
//! session and not before: by that the server knows whether the agent uses its tools.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    os::fd::AsFd,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use oubliette_protocol::relay::{HTTP_TOKEN_ENV, MAX_LINE_BYTES};
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService,
    session::{
        SessionManager as _,
        local::{LocalSessionManager, SessionConfig},
    },
};
use subtle::ConstantTimeEq as _;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

use crate::{
    ClientEnv,
    mcp::ClientMcpService,
    relay_calls::RelayCalls,
    server_connection::{AgentKey, ServerConnection},
    session_tools::SessionTools,
};

/// The path at which MCP is served.
const PATH: &str = "/mcp";
/// The header with the id of an MCP session.
const SESSION_ID_HEADER: &str = "mcp-session-id";
/// Maximum connections at once; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 64;
/// Maximum MCP sessions at once: a new one closes the oldest. Clients that end without closing theirs leave them behind.
const MAX_MCP_SESSIONS: usize = 32;
/// Maximum size of a request's body, in bytes. It is more than the relay carries, so that a call that is too large is
/// refused with the relay's reason.
const MAX_BODY_BYTES: usize = 4 * MAX_LINE_BYTES;
/// How long a connection may take to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The wait after a connection could not be accepted, because this process has too many files open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type HttpResponse = Response<BoxBody<Bytes, Infallible>>;

/// Serves the listener that is this process's stdin, until the process is killed with the rest of the sandbox.
pub(crate) fn main() -> ExitCode {
    match serve() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("oubliette-client: the tools cannot be served over HTTP: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<Infallible> {
    let token = std::env::var(HTTP_TOKEN_ENV).unwrap_or_default();
    if token.is_empty() {
        return Err(io::Error::other(format!("{HTTP_TOKEN_ENV} is not set")));
    }
    let listener = std::net::TcpListener::from(io::stdin().as_fd().try_clone_to_owned()?);
    listener
        .local_addr()
        .map_err(|_| io::Error::other("stdin is not a listening socket"))?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener)?;
        let endpoint = Arc::new(HttpToolServer::new(ClientEnv::read(), &token));
        Ok(accept(listener, endpoint).await)
    })
}

async fn accept(listener: TcpListener, endpoint: Arc<HttpToolServer>) -> Infallible {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = connections.clone().acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let endpoint = endpoint.clone();
                tokio::spawn(async move {
                    endpoint.serve_connection(stream).await;
                    drop(place);
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// The MCP endpoint. It has no `Debug`: it holds the token.
struct HttpToolServer {
    /// The value that the header `Authorization` must have.
    authorization: String,
    service: StreamableHttpService<ClientMcpService, LocalSessionManager>,
    manager: Arc<LocalSessionManager>,
    /// The open MCP sessions, oldest first.
    sessions: Mutex<VecDeque<String>>,
}

impl HttpToolServer {
    fn new(env: ClientEnv, token: &str) -> Self {
        let mut manager = LocalSessionManager::default();
        let mut config = SessionConfig::default();
        // The library would end a session of which only the GET stream is open.
        config.keep_alive = None;
        manager.session_config = config;
        let manager = Arc::new(manager);
        let config = StreamableHttpServerConfig::default().with_max_request_body_bytes(MAX_BODY_BYTES);
        let calls = OnceLock::new();
        let connect = move || {
            let tools = Arc::new(SessionTools::default());
            let key = env.key.clone().map(AgentKey::new);
            let server = ServerConnection::start(env.relay_socket.clone(), key, tools.clone());
            RelayCalls::new(tools, server)
        };
        let make = move || Ok(ClientMcpService::new(calls.get_or_init(&connect).clone(), None));
        Self {
            authorization: format!("Bearer {token}"),
            service: StreamableHttpService::new(make, manager.clone(), config),
            manager,
            sessions: Mutex::default(),
        }
    }

    async fn serve_connection(self: Arc<Self>, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let service = service_fn(move |request| {
            let endpoint = self.clone();
            async move { Ok::<_, Infallible>(endpoint.answer(request).await) }
        });
        // An error is the agent's own: it hung up, or does not speak HTTP.
        let _ = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }

    async fn answer(&self, request: Request<Incoming>) -> HttpResponse {
        if !self.is_authorized(request.headers()) {
            let mut refused = plain(StatusCode::UNAUTHORIZED, "the bearer token is missing or wrong\n");
            refused
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return refused;
        }
        if request.uri().path() != PATH {
            return plain(StatusCode::NOT_FOUND, "MCP is served at /mcp\n");
        }
        let closes = request.method() == Method::DELETE;
        let mut response = self.service.handle(request).await;
        if closes && response.status() == StatusCode::ACCEPTED {
            // Clients treat 200 and 204 as success, but 202 as a failure.
            *response.status_mut() = StatusCode::NO_CONTENT;
        }
        self.bound_sessions(response.headers()).await;
        response
    }

    fn is_authorized(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        given.is_some_and(|given| given.ct_eq(self.authorization.as_bytes()).into())
    }

    /// Closes the oldest MCP session when a response has opened one too many.
    async fn bound_sessions(&self, headers: &HeaderMap) {
        let Some(id) = headers.get(SESSION_ID_HEADER).and_then(|id| id.to_str().ok()) else {
            return;
        };
        let oldest = {
            let mut sessions = self.sessions.lock();
            if sessions.iter().any(|known| known == id) {
                return;
            }
            sessions.push_back(id.to_owned());
            match sessions.len() > MAX_MCP_SESSIONS {
                true => sessions.pop_front(),
                false => None,
            }
        };
        if let Some(oldest) = oldest {
            let _ = self.manager.close_session(&oldest.into()).await;
        }
    }
}

fn plain(status: StatusCode, text: &'static str) -> HttpResponse {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())).boxed());
    *response.status_mut() = status;
    response
}
