//! Performs actions for a command: over the running server's control socket, or on the home when no server runs.

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use oubliette_home::HomeDir;
use oubliette_protocol::{Error, ErrorCode, JsonObject, Result, error::BoxedCause};
use oubliette_store::OpenError;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::{
    actions::{self, ActionOrigin},
    app::App,
    config::ServerConfig,
};

/// How long to wait for another command, or a server that is starting, to release the home's database.
const HOME_LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two attempts to open the database.
const HOME_LOCK_POLL: Duration = Duration::from_millis(25);

/// Performs actions as the home's owner.
pub enum ActionClient {
    /// Through the server running for this home.
    Server(HomeDir),
    /// In this process, on the home's database and files.
    Local(Arc<App>),
}

impl ActionClient {
    /// The running server if there is one, else the home, which is created if missing.
    pub async fn connect(home: &HomeDir) -> Result<Self> {
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

    /// The running server; without one, an error that says how to start it.
    pub async fn connect_running(home: &HomeDir) -> Result<Self> {
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
            ActionClient::Server(home) => post_action(&home.control_socket(), name, &arguments).await,
            ActionClient::Local(app) => {
                Box::pin(actions::perform(
                    app,
                    &app.auth.owner_grant(),
                    name,
                    arguments,
                    &ActionOrigin::outside(),
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
        let ActionClient::Server(home) = self else {
            return Err(Error::unavailable("only a running server has live events"));
        };
        let request = http::Request::get(path)
            .header(http::header::HOST, "localhost")
            .header(http::header::ACCEPT, "text/event-stream")
            .body(Full::default())
            .map_err(Error::internal)?;
        let response = start_request(&home.control_socket(), request).await?;
        let status = response.status();
        if !status.is_success() {
            let body = response
                .into_body()
                .collect()
                .await
                .map_err(no_answer_error)?
                .to_bytes();
            return Err(error_from_body(&body));
        }
        Ok(EventStream {
            body: response.into_body(),
            unread: Vec::new(),
            scanned: 0,
        })
    }

    /// Closes the home's database, if it was opened here.
    pub async fn close(self) {
        if let ActionClient::Local(app) = self {
            app.close().await;
        }
    }
}

/// Whether a server runs for this home.
pub(crate) async fn is_running(home: &HomeDir) -> bool {
    UnixStream::connect(home.control_socket()).await.is_ok()
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
    body: Incoming,
    unread: Vec<u8>,
    /// Length of the prefix of `unread` that holds no newline; searching starts after it.
    scanned: usize,
}

impl EventStream {
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
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame.map_err(no_answer_error)?.into_data() {
                        self.unread.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

async fn post_action(socket: &Path, name: &str, arguments: &JsonObject) -> Result<Value> {
    let body = Bytes::from(serde_json::to_vec(arguments).map_err(Error::internal)?);
    let request = http::Request::post(format!("/api/tools/{name}"))
        .header(http::header::HOST, "localhost")
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(Error::internal)?;
    let (status, body) = send_request(socket, request).await?;
    match status.is_success() {
        true => serde_json::from_slice(&body).map_err(no_answer_error),
        false => Err(error_from_body(&body)),
    }
}

/// Sends one request over the control socket and reads the whole response.
pub(crate) async fn send_request(
    socket: &Path,
    request: http::Request<Full<Bytes>>,
) -> Result<(http::StatusCode, Bytes)> {
    let response = start_request(socket, request).await?;
    let status = response.status();
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(no_answer_error)?
        .to_bytes();
    Ok((status, body))
}

async fn start_request(
    socket: &Path,
    request: http::Request<Full<Bytes>>,
) -> Result<http::Response<Incoming>> {
    let stream = UnixStream::connect(socket).await.map_err(no_answer_error)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(no_answer_error)?;
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(no_answer_error)
}

/// Whether the database could not be opened because another Oubliette has it open.
fn is_in_use(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(OpenError::InUse(_)))
}

/// The error in the body of a response that is not a success.
fn error_from_body(body: &[u8]) -> Error {
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
