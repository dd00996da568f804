//! How a command reaches the server, or the home when no server runs.

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use oubliette_home::Home;
use oubliette_protocol::{Error, ErrorCode, Object, Result};
use oubliette_store::OpenError;
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::{
    actions::{self, Origin},
    app::App,
    config::Config,
};

/// How long another command, or a server that is coming up, may hold the home.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at whether it still does.
const LOOK: Duration = Duration::from_millis(25);

/// Something that performs actions as the home's owner.
pub enum Client {
    /// A running server.
    Server(Home),
    /// The home itself.
    Local(Arc<App>),
}

impl Client {
    /// The running server if there is one, else the home.
    pub async fn connect(home: &Home) -> Result<Self> {
        let busy = Error::from(OpenError::InUse(home.database_path()));
        let give_up = tokio::time::Instant::now() + PATIENCE;
        loop {
            if is_running(home).await {
                return Ok(Client::Server(home.clone()));
            }
            home.create()?;
            let config = Config::load(&home.config_path(), &|name| std::env::var(name).ok())?;
            match App::open(home.clone(), config).await {
                // Another command, done in a moment, or a server that does not listen yet.
                Err(error) if error == busy && tokio::time::Instant::now() < give_up => {
                    tokio::time::sleep(LOOK).await;
                }
                opened => return Ok(Client::Local(opened?)),
            }
        }
    }

    /// The running server; without one, what to do.
    pub async fn running(home: &Home) -> Result<Self> {
        match is_running(home).await {
            true => Ok(Client::Server(home.clone())),
            false => Err(not_running(home)),
        }
    }

    /// Performs an action.
    pub async fn call(&self, name: &str, arguments: Value) -> Result<Value> {
        let Value::Object(arguments) = arguments else {
            return Err(Error::internal("arguments are an object"));
        };
        match self {
            Client::Server(home) => post(&home.control_socket(), name, &arguments).await,
            Client::Local(app) => {
                Box::pin(actions::perform(
                    app,
                    &app.auth.owner(),
                    name,
                    arguments,
                    &Origin::outside(),
                ))
                .await
            }
        }
    }

    /// Performs a listing action. With a limit one page of it; without, every page as one.
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

    /// Follows one of the server's event streams.
    pub async fn follow(&self, path: &str) -> Result<Stream> {
        let Client::Server(home) = self else {
            return Err(Error::unavailable("only a running server has live events"));
        };
        let request = http::Request::get(path)
            .header(http::header::HOST, "localhost")
            .header(http::header::ACCEPT, "text/event-stream")
            .body(Full::default())
            .map_err(Error::internal)?;
        let response = open(&home.control_socket(), request).await?;
        let status = response.status();
        if !status.is_success() {
            let body = response
                .into_body()
                .collect()
                .await
                .map_err(|e| lost(&e))?
                .to_bytes();
            return Err(refused(&body));
        }
        Ok(Stream {
            body: response.into_body(),
            unread: Vec::new(),
            read: 0,
        })
    }

    /// Lets go of the home.
    pub async fn close(self) {
        if let Client::Local(app) = self {
            app.close().await;
        }
    }
}

/// Whether a server runs for this home.
pub async fn is_running(home: &Home) -> bool {
    UnixStream::connect(home.control_socket()).await.is_ok()
}

/// What needs a server and has none.
fn not_running(home: &Home) -> Error {
    let (root, flag) = (home.root(), super::home_flag(home));
    Error::unavailable(format!(
        "no server is running for {}: start one in another terminal with `oubliette{flag} up`, then try again",
        root.display()
    ))
}

/// Server-sent events, one JSON value each.
pub struct Stream {
    body: Incoming,
    unread: Vec<u8>,
    /// How much of `unread` is known to hold no newline.
    read: usize,
}

impl Stream {
    /// The next event; none when the server ended the stream. Dropping the wait loses nothing.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            while let Some(at) = self.unread[self.read..].iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=self.read + at).collect();
                self.read = 0;
                if let Some(data) = line.strip_prefix(b"data:") {
                    return serde_json::from_slice(data).map(Some).map_err(|e| lost(&e));
                }
            }
            self.read = self.unread.len();
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame.map_err(|e| lost(&e))?.into_data() {
                        self.unread.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

async fn post(socket: &Path, name: &str, arguments: &Object) -> Result<Value> {
    let body = Bytes::from(serde_json::to_vec(arguments).map_err(Error::internal)?);
    let request = http::Request::post(format!("/api/tools/{name}"))
        .header(http::header::HOST, "localhost")
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(Error::internal)?;
    let (status, body) = send(socket, request).await?;
    match status.is_success() {
        true => serde_json::from_slice(&body).map_err(|e| lost(&e)),
        false => Err(refused(&body)),
    }
}

/// One request over the control socket.
pub async fn send(socket: &Path, request: http::Request<Full<Bytes>>) -> Result<(http::StatusCode, Bytes)> {
    let response = open(socket, request).await?;
    let status = response.status();
    let body = response
        .into_body()
        .collect()
        .await
        .map_err(|e| lost(&e))?
        .to_bytes();
    Ok((status, body))
}

async fn open(socket: &Path, request: http::Request<Full<Bytes>>) -> Result<http::Response<Incoming>> {
    let stream = UnixStream::connect(socket).await.map_err(|e| lost(&e))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| lost(&e))?;
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(|e| lost(&e))
}

/// The error a refusal's body tells.
fn refused(body: &[u8]) -> Error {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let code = serde_json::from_value(value["error"]["code"].clone()).unwrap_or(ErrorCode::Internal);
    Error::new(
        code,
        value["error"]["message"].as_str().unwrap_or("the server refused"),
    )
}

fn lost(cause: &dyn std::fmt::Display) -> Error {
    Error::unavailable("the running server did not answer; look at its log, or stop it and try again")
        .with_log(cause)
}
