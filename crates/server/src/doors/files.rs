//! `/api/workspaces/{id}/…`: reads, writes, deletes and archives a workspace's files.

use std::path::PathBuf;

use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    response::Response,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use oubliette_protocol::{Error, Result, Scope, WorkspaceId};
use oubliette_store::{AuditEntry, AuditPrincipal, WorkspaceRow};
use serde_json::json;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::ReaderStream;

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    body::{self, BodyError},
    http::HttpDoors,
    reply,
};
use crate::{
    actions::run_blocking,
    auth::Grant,
    visible::parse_id,
    workspace::{
        archive as packing,
        files::{self, FileOrFolder, WorkspacePath},
    },
};

/// `GET /api/workspaces/{id}/files`: lists the workspace's root.
pub(crate) async fn root(
    state: State<HttpDoors>,
    door: Extension<DoorKind>,
    Path(id): Path<String>,
    method: Method,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    file(state, door, Path((id, String::new())), method, headers, body).await
}

/// `GET|PUT|DELETE /api/workspaces/{id}/files/{path}`.
pub(crate) async fn file(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    Path((id, path)): Path<(String, String)>,
    method: Method,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    let change = match method {
        Method::GET | Method::HEAD => None,
        Method::PUT => Some("workspace_file_put"),
        Method::DELETE => Some("workspace_file_delete"),
        _ => return Err(reply::method_not_allowed("GET, PUT, DELETE")),
    };
    let grant = access::authenticate(&doors.app, door, &headers, AcceptedCredentials::BearerOrCookie).await?;
    let Some(action) = change else {
        let found = get(&doors, &grant, &id, &path).await;
        return found.map_err(|error| error_response(&error));
    };
    let content = match body::read(&headers, body).await {
        Ok(content) => content,
        Err(BodyError::TooLarge) => return Err(reply::body_too_large(body::MAX_BODY_BYTES)),
        // An incomplete body is not written: the file stays as it was.
        Err(BodyError::Incomplete) => {
            return Err(reply::error(&Error::invalid("the request body is incomplete")));
        }
    };
    let mut project = None;
    let outcome = async {
        grant.require(Scope::Write, action)?;
        access::require_csrf_header(&grant, &headers)?;
        let (row, dir) = find_workspace(&doors, &grant, &id).await?;
        project = Some(row.project_id);
        let inner = WorkspacePath::parse(&path)?;
        let size = content.len();
        match method {
            Method::PUT => {
                let shown = inner.to_string();
                run_blocking(move || files::write_file(&dir, &inner, &content)).await?;
                Ok(json!({ "path": shown, "size": size }))
            }
            _ => {
                let shown = inner.to_string();
                run_blocking(move || files::remove_path(&dir, &inner)).await?;
                Ok(json!({ "path": shown, "deleted": true }))
            }
        }
    }
    .await;
    let entry = AuditEntry {
        principal: AuditPrincipal::of_grant(grant.token_id()),
        session_id: None,
        action: action.into(),
        target: Some(format!(
            "{}/{}",
            truncate_for_audit(&id),
            truncate_for_audit(&path)
        )),
        outcome: outcome
            .as_ref()
            .err()
            .map_or("ok", |e: &Error| e.code.as_str())
            .into(),
        project_id: project,
        detail: None,
    };
    doors.app.queue_audit(entry).await;
    match outcome {
        Ok(shape) => Ok(reply::json(StatusCode::OK, &shape)),
        Err(error) => Err(error_response(&error)),
    }
}

fn truncate_for_audit(text: &str) -> String {
    text.chars().take(200).collect()
}

fn error_response(error: &Error) -> Response {
    if error.has_cause() {
        tracing::warn!(error = %error.for_log(), "workspace file request failed");
    }
    reply::error(error)
}

/// A workspace the grant may see, and its directory.
async fn find_workspace(doors: &HttpDoors, grant: &Grant, id: &str) -> Result<(WorkspaceRow, PathBuf)> {
    let id: WorkspaceId = parse_id("workspace", id)?;
    let row = doors.app.visible_workspace(grant, &id).await?;
    let dir = doors.app.home.workspace_dir(&row.project_id, &row.workspace_id);
    Ok((row, dir))
}

async fn get(doors: &HttpDoors, grant: &Grant, id: &str, path: &str) -> Result<Response> {
    let (_, dir) = find_workspace(doors, grant, id).await?;
    let inner = WorkspacePath::parse(path)?;
    let shown = inner.to_string();
    match run_blocking(move || files::open_path(&dir, &inner)).await? {
        FileOrFolder::Folder(entries) => Ok(reply::json(
            StatusCode::OK,
            &json!({ "path": shown, "entries": entries }),
        )),
        FileOrFolder::File(file, size) => {
            use tokio::io::AsyncReadExt as _;
            // Bounded by the size it had when opened: a file that grows meanwhile must not exceed its Content-Length.
            let reader = tokio::fs::File::from_std(file).take(size);
            let stream = ReaderStream::with_capacity(reader, 64 * 1024);
            let mut response = reply::untrusted_bytes("application/octet-stream", Body::from_stream(stream));
            response
                .headers_mut()
                .insert(header::CONTENT_LENGTH, HeaderValue::from(size));
            Ok(response)
        }
    }
}

/// `GET /api/workspaces/{id}/archive`: the workspace as a tar.gz.
pub(crate) async fn archive(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    let grant = access::authenticate(&doors.app, door, &headers, AcceptedCredentials::BearerOrCookie).await?;
    let packed = async {
        let (row, dir) = find_workspace(&doors, &grant, &id).await?;
        let chunks = packing::pack(&dir)?;
        let mut response =
            reply::untrusted_bytes("application/gzip", Body::from_stream(ReceiverStream::new(chunks)));
        let name = format!("attachment; filename=\"{}.tar.gz\"", row.workspace_id);
        if let Ok(name) = HeaderValue::from_str(&name) {
            response.headers_mut().insert(header::CONTENT_DISPOSITION, name);
        }
        Ok(response)
    };
    packed.await.map_err(|error: Error| error_response(&error))
}
