//! The fuzz targets of what the server reads: configuration, headers, paths, action arguments, MCP bodies, and the names
//! in a workspace. Each panics only when an invariant is broken.

use std::{
    io::Read as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body};
use futures::StreamExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use oubliette_home::HomeDir;
use oubliette_protocol::{Error, ErrorCode, JsonObject, Result, Scope, WorkspaceId};
use serde_json::{Value, value::RawValue};
use tower::ServiceExt as _;

use crate::{
    actions::{self, Action},
    app::App,
    auth::{TokenSpec, expose},
    config::ServerConfig,
    doors::{DoorKind, allowed_hosts::AllowedHosts, http::HttpDoors},
    workspace::{archive::ArchiveDownloads, files::WorkspacePath},
};

/// `oubliette.toml`: a refusal names the file, and what is accepted is within its bounds.
pub fn fuzz_config(text: &str) {
    match ServerConfig::parse(text, "oubliette.toml", &|_| None) {
        Ok(config) => {
            assert!(config.rate.per_second >= 1 && config.rate.burst >= 1);
            assert!(config.sandbox.cpus.is_finite() && config.sandbox.cpus > 0.0);
            assert!(config.sandbox.memory_mb >= 1 && config.sandbox.pids >= 1);
            assert!(config.trust.read_only.iter().all(|path| path.is_absolute()));
        }
        Err(error) => {
            assert!(error.message.starts_with("oubliette.toml"), "{error}");
            assert_eq!(error.code, ErrorCode::InvalidArgument);
        }
    }
}

/// `<host>` or `<host> <origin>`: only this server's own names are taken for it.
pub fn fuzz_host_headers(text: &str) {
    let hosts = AllowedHosts::new(&["example.com".into(), "h:81".into()], ([10, 0, 0, 1], 80).into());
    let (host, origin) = match text.split_once(' ') {
        Some((host, origin)) => (host, Some(origin)),
        None => (text, None),
    };
    let mut headers = HeaderMap::new();
    for (name, value) in [(header::HOST, Some(host)), (header::ORIGIN, origin)] {
        match value.map(HeaderValue::from_str) {
            Some(Ok(value)) => drop(headers.insert(name, value)),
            // No such header can be sent.
            Some(Err(_)) => return,
            None => {}
        }
    }
    if hosts.check_request(&Uri::from_static("/"), &headers).is_ok() {
        assert!(is_own_name(host), "{host:?} is taken for this server");
        if let Some(origin) = origin {
            let page = origin
                .strip_prefix("http://")
                .or_else(|| origin.strip_prefix("https://"));
            assert!(
                page.is_some_and(is_own_name),
                "{origin:?} is taken for a page of this server"
            );
        }
    }
}

/// Whether a browser that is given this name asks this server: decided without the parser under test.
fn is_own_name(authority: &str) -> bool {
    let authority = authority.trim().to_ascii_lowercase();
    let name = match authority.rsplit_once(':') {
        Some((name, port)) if !name.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => &authority,
    };
    let loopback = name.parse::<Ipv4Addr>().is_ok_and(|ip| ip.is_loopback());
    let bracketed = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let loopback_v6 = bracketed.is_some_and(|inner| inner.parse() == Ok(Ipv6Addr::LOCALHOST));
    loopback || loopback_v6 || matches!(name, "localhost" | "example.com" | "h" | "10.0.0.1")
}

/// The path of a file route: what is accepted has no part that leads elsewhere.
pub fn fuzz_workspace_path(text: &str) {
    let Ok(path) = WorkspacePath::parse(text) else {
        return;
    };
    let shown = path.to_string();
    assert!(!shown.starts_with('/') && !shown.contains('\0'));
    assert!(shown.is_empty() || shown.split('/').all(|part| !matches!(part, "" | "." | "..")));
    assert_eq!(
        WorkspacePath::parse(&shown).ok(),
        Some(path),
        "{shown:?} is another path"
    );
}

/// `<action>` on the first line, its arguments after it: an error is the caller's, and says which argument.
pub fn fuzz_action(text: &str) {
    let (name, arguments) = text.split_once('\n').unwrap_or((text, "{}"));
    let Ok(arguments) = serde_json::from_str::<JsonObject>(arguments) else {
        return;
    };
    match Action::parse(name, arguments) {
        Ok(_) => assert!(actions::find(name).is_some()),
        Err(error) => assert!(
            matches!(error.code, ErrorCode::InvalidArgument | ErrorCode::NotFound),
            "{error}"
        ),
    }
}

/// Packs a folder; every entry of the archive has a path beneath it, and each file of the folder is there once.
pub fn fuzz_archive(folder: &Path) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return;
    };
    let bytes = runtime.block_on(async {
        let mut bytes = Vec::new();
        let downloads = ArchiveDownloads::default();
        let Ok(mut chunks) = downloads.pack(&WorkspaceId::generate(), folder) else {
            return bytes;
        };
        while let Some(chunk) = chunks.next().await {
            match chunk {
                Ok(chunk) => bytes.extend_from_slice(&chunk),
                Err(error) => panic!("no archive is made: {error}"),
            }
        }
        bytes
    });
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
    let entries = tar
        .entries()
        .unwrap_or_else(|error| panic!("no archive: {error}"));
    let mut count = 0;
    for entry in entries {
        let mut entry = entry.unwrap_or_else(|error| panic!("an entry that cannot be read: {error}"));
        let path = entry.path().map(PathBuf::from).unwrap_or_default();
        let plain = |part: std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
        assert!(
            !path.as_os_str().is_empty() && path.components().all(plain),
            "{path:?} leads elsewhere"
        );
        let mut content = Vec::new();
        assert!(entry.read_to_end(&mut content).is_ok());
        count += 1;
    }
    let there = std::fs::read_dir(folder).map_or(0, Iterator::count);
    assert_eq!(count, there, "entries of a flat folder");
}

/// A server without a listener, for MCP bodies.
pub struct McpFuzzer {
    runtime: tokio::runtime::Runtime,
    router: Router,
    bearer: HeaderValue,
    session: HeaderValue,
}

/// How long one request may wait. Long polls and streams end here; what must answer at once is far below it.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(100);

impl McpFuzzer {
    /// A server in an empty directory, with a read token: actions that change something are refused, so that no input
    /// starts a session or reaches a network.
    pub fn new(home: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Error::internal)?;
        let (router, bearer, session) = runtime.block_on(async {
            let home = HomeDir::at(home)?;
            home.create()?;
            let config = ServerConfig::parse("", "oubliette.toml", &|_| None)?;
            let app = App::open(home, config).await?;
            let token = TokenSpec {
                name: "fuzz".into(),
                scope: Scope::Read,
                project: None,
                expires_at: None,
                session: None,
            };
            let (_, token) = app.auth.mint(token).await?;
            let bearer =
                HeaderValue::from_str(&format!("Bearer {}", expose(&token))).map_err(Error::internal)?;
            let router = HttpDoors::new(Arc::clone(&app), ([127, 0, 0, 1], 8080).into()).router();
            let session = Self::initialize(&router, &bearer).await?;
            Ok::<_, Error>((router, bearer, session))
        })?;
        Ok(Self {
            runtime,
            router,
            bearer,
            session,
        })
    }

    async fn initialize(router: &Router, bearer: &HeaderValue) -> Result<HeaderValue> {
        let body = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"fuzz","version":"0"}}}"#;
        let request = request(bearer, &[], body.as_bytes().to_vec())?;
        let answer = router.clone().oneshot(request).await.map_err(Error::internal)?;
        let id = answer.headers().get("mcp-session-id").cloned();
        id.ok_or_else(|| Error::internal("no MCP session"))
    }

    /// One body. The first byte says how it is sent: `i` without an MCP session, as an `initialize` is; `s` in one
    /// (2025-11-25); anything else stateless (2026-07-28), with the headers that the body itself names.
    pub fn run(&self, bytes: &[u8]) {
        let Some((kind, body)) = bytes.split_first() else {
            return;
        };
        let text = |value: &str| HeaderValue::from_str(value).ok();
        let mut headers: Vec<(&'static str, HeaderValue)> = Vec::new();
        match kind {
            b'i' => {}
            b's' => {
                headers.push(("mcp-session-id", self.session.clone()));
                headers.extend(text("2025-11-25").map(|value| ("mcp-protocol-version", value)));
            }
            _ => {
                headers.extend(text("2026-07-28").map(|value| ("mcp-protocol-version", value)));
                let message: Value = serde_json::from_slice(body).unwrap_or_default();
                let name = ["/params/name", "/params/uri"]
                    .into_iter()
                    .find_map(|at| message.pointer(at)?.as_str());
                let method = message["method"].as_str().and_then(text);
                headers.extend(method.map(|value| ("mcp-method", value)));
                headers.extend(name.and_then(text).map(|value| ("mcp-name", value)));
            }
        }
        let Ok(request) = request(&self.bearer, &headers, body.to_vec()) else {
            return;
        };
        let asked = async {
            let Ok(answer) = self.router.clone().oneshot(request).await;
            let (head, body) = answer.into_parts();
            if let Some(id) = head.headers.get("mcp-session-id").filter(|_| *kind == b'i') {
                self.end_session(id.clone()).await;
            }
            let body = body
                .collect()
                .await
                .map(|body| body.to_bytes())
                .unwrap_or_default();
            (head, body)
        };
        let answered = self
            .runtime
            .block_on(async { tokio::time::timeout(REQUEST_TIMEOUT, asked).await });
        // A stream or a long poll has no end of its own.
        let Ok((head, body)) = answered else { return };
        assert!(
            head.status.as_u16() < 500,
            "{}: {}",
            head.status,
            String::from_utf8_lossy(&body)
        );
        let json = head
            .headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
        if json && head.status != StatusCode::NO_CONTENT {
            assert!(
                serde_json::from_slice::<&RawValue>(&body).is_ok(),
                "an answer that is no JSON"
            );
        }
    }

    async fn end_session(&self, id: HeaderValue) {
        if let Ok(mut request) = request(&self.bearer, &[("mcp-session-id", id)], Vec::new()) {
            *request.method_mut() = Method::DELETE;
            let _ = self.router.clone().oneshot(request).await;
        }
    }
}

/// A request to `/mcp` as it comes in over the network.
fn request(
    bearer: &HeaderValue,
    more: &[(&'static str, HeaderValue)],
    body: Vec<u8>,
) -> Result<Request<Body>> {
    let mut request = Request::post("/mcp")
        .body(Body::from(body))
        .map_err(Error::internal)?;
    let headers = request.headers_mut();
    headers.insert(header::HOST, HeaderValue::from_static("localhost"));
    headers.insert(header::AUTHORIZATION, bearer.clone());
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(
        header::ACCEPT,
        HeaderValue::from_static("application/json, text/event-stream"),
    );
    for (name, value) in more {
        headers.insert(HeaderName::from_static(name), value.clone());
    }
    let peer = IpAddr::V4(Ipv4Addr::LOCALHOST);
    request
        .extensions_mut()
        .insert(DoorKind::Network { peer, tls: false });
    Ok(request)
}
