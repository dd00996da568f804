//! Performs actions for a command: on a server elsewhere, over the running server's control socket, or on the home when
//! no server runs.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use oubliette_home::HomeDir;
use oubliette_protocol::{Error, ErrorCode, JsonObject, Result, error::BoxedCause};
use oubliette_store::OpenError;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use super::{CommandContext, ServerTarget, remote::RemoteServer};
use crate::{
    actions::{self, ClientContext},
    app::App,
    config::ServerConfig,
    doors::control,
};

/// How long to wait for another command, or a server that is starting, to release the home's database.
const HOME_LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two attempts to open the database.
const HOME_LOCK_POLL: Duration = Duration::from_millis(25);

/// Performs actions: as the home's owner, or with a token on a server elsewhere.
pub enum ActionClient {
    /// On a server elsewhere.
    Remote(RemoteServer),
    /// Through the server running for this home.
    Server(HomeDir),
    /// In this process, on the home's database and files.
    Local(Arc<App>),
}

impl ActionClient {
    /// The server that was chosen; else the running one if there is one, else the home, which is created if missing.
    pub async fn connect(context: &CommandContext) -> Result<Self> {
        let home = match &context.target {
            ServerTarget::Remote(remote) => return Ok(ActionClient::Remote(remote.clone())),
            ServerTarget::Home => &context.home,
        };
        let give_up = tokio::time::Instant::now() + HOME_LOCK_TIMEOUT;
        loop {
            if is_running(home).await {
                return Ok(ActionClient::Server(home.clone()));
            }
            home.create()?;
            let config = ServerConfig::load(&home.config_path(), &|name| std::env::var(name).ok())?;
            match App::open(home.clone(), config).await {
                // Another command has the database open, or a server that does not listen yet: try again.
                Err(error) if is_in_use(&error) && tokio::time::Instant::now() < give_up => {
                    tokio::time::sleep(HOME_LOCK_POLL).await;
                }
                opened => return Ok(ActionClient::Local(opened?)),
            }
        }
    }

    /// The server that was chosen, or the running one; without one, an error that says how to start it.
    pub async fn connect_running(context: &CommandContext) -> Result<Self> {
        let home = match &context.target {
            ServerTarget::Remote(remote) => return Ok(ActionClient::Remote(remote.clone())),
            ServerTarget::Home => &context.home,
        };
        match is_running(home).await {
            true => Ok(ActionClient::Server(home.clone())),
            false => Err(not_running_error(home)),
        }
    }

    /// Performs the action `name`; `arguments` must be a JSON object.
    pub async fn call(&self, name: &str, arguments: Value) -> Result<Value> {
        let Value::Object(arguments) = arguments else {
            return Err(Error::internal("arguments are an object"));
        };
        match self {
            ActionClient::Remote(remote) => {
                let path = format!("/api/tools/{name}");
                let request = remote.request(reqwest::Method::POST, &path).json(&arguments);
                let answer = remote.send(request).await?;
                serde_json::from_slice(&remote.read(answer).await?).map_err(no_answer_error)
            }
            ActionClient::Server(home) => post_action(home, name, &arguments).await,
            ActionClient::Local(app) => {
                Box::pin(actions::perform(
                    app,
                    &app.auth.owner_grant(),
                    name,
                    arguments,
                    &ClientContext::default(),
                ))
                .await
            }
        }
    }

    /// Performs a listing action whose rows are in the field `items`. With a limit: one page, with its cursor;
    /// without: the rows of all pages.
    pub async fn list(
        &self,
        name: &str,
        items: &str,
        mut arguments: Value,
        limit: Option<u32>,
    ) -> Result<Value> {
        if let Some(limit) = limit {
            arguments["limit"] = json!(limit);
            return self.call(name, arguments).await;
        }
        arguments["limit"] = json!(1000);
        let mut all = Vec::new();
        loop {
            let mut page = self.call(name, arguments.clone()).await?;
            if let Value::Array(rows) = page[items].take() {
                all.extend(rows);
            }
            match page["next_cursor"].take() {
                Value::Null => return Ok(json!({ items: all })),
                cursor => arguments["cursor"] = cursor,
            }
        }
    }

    /// Opens one of the server's event streams: `path` is that of a GET request that answers with SSE.
    pub async fn follow(&self, path: &str) -> Result<EventStream> {
        let home = match self {
            ActionClient::Server(home) => home,
            ActionClient::Remote(remote) => {
                let request = remote
                    .request(reqwest::Method::GET, path)
                    .header(http::header::ACCEPT, "text/event-stream");
                let response = remote.send(request).await?;
                return Ok(EventStream::new(StreamBody::Remote(response)));
            }
            ActionClient::Local(_) => {
                return Err(Error::unavailable("only a running server has live events"));
            }
        };
        let request = http::Request::get(path)
            .header(http::header::HOST, "localhost")
            .header(http::header::ACCEPT, "text/event-stream")
            .body(Full::<Bytes>::default())
            .map_err(Error::internal)?;
        let response = start_request(home, request).await?;
        let status = response.status();
        if !status.is_success() {
            return Err(error_from_body(&read_whole(response).await?));
        }
        Ok(EventStream::new(StreamBody::Control(response.into_body())))
    }

    /// Sends a file to a path of the server with PUT, reporting how many of its bytes are sent.
    pub(crate) async fn upload(
        &self,
        path: &str,
        file: std::fs::File,
        progress: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<()> {
        let size = file.metadata().map_err(Error::internal)?.len();
        let mut sent = 0;
        let stream = tokio_util::io::ReaderStream::with_capacity(tokio::fs::File::from_std(file), 64 * 1024);
        let stream = futures::StreamExt::inspect(stream, move |chunk| {
            sent += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
            progress(sent, size);
        });
        match self {
            ActionClient::Remote(remote) => {
                let request = remote
                    .request(reqwest::Method::PUT, path)
                    .header(http::header::CONTENT_LENGTH, size)
                    .body(reqwest::Body::wrap_stream(stream));
                remote.send(request).await.map(drop)
            }
            ActionClient::Server(home) => {
                let frames = futures::TryStreamExt::map_ok(stream, hyper::body::Frame::data);
                let request = http::Request::put(path)
                    .header(http::header::HOST, "localhost")
                    .header(http::header::CONTENT_LENGTH, size)
                    .body(http_body_util::StreamBody::new(Box::pin(frames)))
                    .map_err(Error::internal)?;
                let response = start_request(home, request).await?;
                match response.status().is_success() {
                    true => Ok(()),
                    false => Err(error_from_body(&read_whole(response).await?)),
                }
            }
            ActionClient::Local(_) => Err(Error::unavailable("only a running server takes files")),
        }
    }

    /// Writes what a path of the server answers to a GET request into a file, reporting how many bytes have come.
    pub(crate) async fn download(
        &self,
        path: &str,
        file: &mut std::fs::File,
        progress: impl Fn(u64),
    ) -> Result<()> {
        use std::io::Write as _;
        let mut body = match self {
            ActionClient::Remote(remote) => {
                StreamBody::Remote(remote.send(remote.request(reqwest::Method::GET, path)).await?)
            }
            ActionClient::Server(home) => {
                let response = start_request(home, get_request(path)?).await?;
                match response.status().is_success() {
                    true => StreamBody::Control(response.into_body()),
                    false => return Err(error_from_body(&read_whole(response).await?)),
                }
            }
            ActionClient::Local(_) => return Err(Error::unavailable("only a running server gives files")),
        };
        let mut received = 0;
        while let Some(chunk) = body.next().await? {
            file.write_all(&chunk).map_err(Error::internal)?;
            received += chunk.len() as u64;
            progress(received);
        }
        Ok(())
    }

    /// The JSON that a path of the server answers to a GET request; null if the answer is something else, such as a file.
    pub(crate) async fn get_json(&self, path: &str) -> Result<Value> {
        let is_json = |headers: &http::HeaderMap| {
            let kind = headers.get(http::header::CONTENT_TYPE);
            kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"))
        };
        let body = match self {
            ActionClient::Remote(remote) => {
                let response = remote.send(remote.request(reqwest::Method::GET, path)).await?;
                match is_json(response.headers()) {
                    true => remote.read(response).await?,
                    false => return Ok(Value::Null),
                }
            }
            ActionClient::Server(home) => {
                let response = start_request(home, get_request(path)?).await?;
                match (response.status().is_success(), is_json(response.headers())) {
                    (true, true) => read_whole(response).await?,
                    (true, false) => return Ok(Value::Null),
                    (false, _) => return Err(error_from_body(&read_whole(response).await?)),
                }
            }
            ActionClient::Local(_) => return Err(Error::unavailable("only a running server gives files")),
        };
        serde_json::from_slice(&body).map_err(no_answer_error)
    }

    /// Whether the server still answers; the home always does.
    pub(crate) async fn is_reachable(&self) -> bool {
        match self {
            ActionClient::Server(home) => is_running(home).await,
            ActionClient::Remote(remote) => {
                let health = remote.request(reqwest::Method::GET, "/health");
                remote.send(health).await.is_ok()
            }
            ActionClient::Local(_) => true,
        }
    }

    /// Closes the home's database, if it was opened here.
    pub async fn close(self) {
        if let ActionClient::Local(app) = self {
            app.close().await;
        }
    }
}

/// Whether a server runs for this home. That its control socket can be connected to does not show it: a process that a
/// killed server was just starting has inherited the socket, until it calls exec. The kernel names who listens on it.
pub(crate) async fn is_running(home: &HomeDir) -> bool {
    let Ok(stream) = UnixStream::connect(home.control_socket()).await else {
        return false;
    };
    let listening = stream.peer_cred().ok().and_then(|server| server.pid());
    listening.is_none_or(oubliette_os::process_runs)
}

/// The error of a command that needs a running server.
fn not_running_error(home: &HomeDir) -> Error {
    let (root, flag) = (home.root(), super::home_flag(home));
    Error::unavailable(format!(
        "no server is running for {}: start one in another terminal with `oubliette{flag} up`, then try again",
        root.display()
    ))
}

/// A stream of server-sent events, one JSON value each.
pub struct EventStream {
    body: StreamBody,
    unread: Vec<u8>,
    /// Length of the prefix of `unread` that holds no newline; searching starts after it.
    scanned: usize,
}

/// Where the bytes of a stream come from.
enum StreamBody {
    /// The control socket.
    Control(Incoming),
    /// A server elsewhere.
    Remote(reqwest::Response),
}

impl StreamBody {
    /// The next bytes; none at the end. Cancel-safe.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self {
                StreamBody::Remote(response) => return response.chunk().await.map_err(no_answer_error),
                StreamBody::Control(body) => match body.frame().await {
                    None => return Ok(None),
                    Some(frame) => {
                        if let Ok(data) = frame.map_err(no_answer_error)?.into_data() {
                            return Ok(Some(data));
                        }
                    }
                },
            }
        }
    }
}

impl EventStream {
    fn new(body: StreamBody) -> Self {
        Self {
            body,
            unread: Vec::new(),
            scanned: 0,
        }
    }

    /// The next event; none when the server ended the stream. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            while let Some(at) = self.unread[self.scanned..].iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=self.scanned + at).collect();
                self.scanned = 0;
                if let Some(data) = line.strip_prefix(b"data:") {
                    return serde_json::from_slice(data).map(Some).map_err(no_answer_error);
                }
            }
            self.scanned = self.unread.len();
            match self.body.next().await? {
                None => return Ok(None),
                Some(data) => self.unread.extend_from_slice(&data),
            }
        }
    }
}

async fn post_action(home: &HomeDir, name: &str, arguments: &JsonObject) -> Result<Value> {
    let body = Bytes::from(serde_json::to_vec(arguments).map_err(Error::internal)?);
    let request = http::Request::post(format!("/api/tools/{name}"))
        .header(http::header::HOST, "localhost")
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(Error::internal)?;
    let (status, body) = send_request(home, request).await?;
    match status.is_success() {
        true => serde_json::from_slice(&body).map_err(no_answer_error),
        false => Err(error_from_body(&body)),
    }
}

/// Sends one request over the control socket and reads the whole response.
pub(crate) async fn send_request(
    home: &HomeDir,
    request: http::Request<Full<Bytes>>,
) -> Result<(http::StatusCode, Bytes)> {
    let response = start_request(home, request).await?;
    let status = response.status();
    Ok((status, read_whole(response).await?))
}

/// Reads a whole response.
async fn read_whole(response: http::Response<Incoming>) -> Result<Bytes> {
    let body = response.into_body().collect().await.map_err(no_answer_error)?;
    Ok(body.to_bytes())
}

/// A GET request of a path over the control socket.
fn get_request(path: &str) -> Result<http::Request<Full<Bytes>>> {
    http::Request::get(path)
        .header(http::header::HOST, "localhost")
        .body(Full::default())
        .map_err(Error::internal)
}

async fn start_request<B>(home: &HomeDir, request: http::Request<B>) -> Result<http::Response<Incoming>>
where
    B: hyper::body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxedCause>,
{
    let stream = control::connect(home).await.map_err(no_answer_error)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(no_answer_error)?;
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(no_answer_error)
}

/// Whether the database could not be opened because another Oubliette has it open.
fn is_in_use(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<OpenError>());
    cause.is_some_and(OpenError::is_in_use)
}

/// The error in the body of a response that is not a success.
pub(crate) fn error_from_body(body: &[u8]) -> Error {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let code = serde_json::from_value(value["error"]["code"].clone()).unwrap_or(ErrorCode::Internal);
    Error::new(
        code,
        value["error"]["message"].as_str().unwrap_or("the server refused"),
    )
}

fn no_answer_error(cause: impl Into<BoxedCause>) -> Error {
    Error::unavailable("the running server did not answer; look at its log, or stop it and try again")
        .with_cause(cause)
}
