//! How a command reaches the server, or the home when no server runs.

use std::{path::Path, sync::Arc};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use oubliette_home::Home;
use oubliette_protocol::{Error, ErrorCode, Object, Result};
use serde_json::Value;
use tokio::net::UnixStream;

use crate::{actions::{self, Origin}, app::App, config::Config};

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
        match UnixStream::connect(home.control_socket()).await {
            Ok(_) => Ok(Client::Server(home.clone())),
            Err(_) => {
                home.create()?;
                let config = Config::load(&home.config_path(), &|name| std::env::var(name).ok())?;
                Ok(Client::Local(App::open(home.clone(), config).await?))
            }
        }
    }

    /// Performs an action.
    pub async fn call(&self, name: &str, arguments: Value) -> Result<Value> {
        let Value::Object(arguments) = arguments else { return Err(Error::internal("arguments are an object")) };
        match self {
            Client::Server(home) => post(&home.control_socket(), name, &arguments).await,
            Client::Local(app) => {
                Box::pin(actions::perform(app, &app.auth.owner(), name, arguments, &Origin::outside())).await
            }
        }
    }

    /// Lets go of the home.
    pub async fn close(self) {
        if let Client::Local(app) = self {
            app.close().await;
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
    let value: Value = serde_json::from_slice(&body).map_err(|e| lost(&e))?;
    if status.is_success() {
        return Ok(value);
    }
    let code = serde_json::from_value(value["error"]["code"].clone()).unwrap_or(ErrorCode::Internal);
    Err(Error::new(code, value["error"]["message"].as_str().unwrap_or("the server refused")))
}

/// One request over the control socket.
pub async fn send(socket: &Path, request: http::Request<Full<Bytes>>) -> Result<(http::StatusCode, Bytes)> {
    let stream = UnixStream::connect(socket).await.map_err(|e| lost(&e))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| lost(&e))?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(|e| lost(&e))?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|e| lost(&e))?.to_bytes();
    Ok((status, body))
}

fn lost(cause: &dyn std::fmt::Display) -> Error {
    Error::unavailable("the running server did not answer; look at its log, or stop it and try again").with_log(cause)
}
