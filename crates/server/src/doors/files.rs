//! `/api/workspaces/{id}/…`: reads, writes, deletes and archives a workspace's files.

use std::path::PathBuf;

use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    response::Response,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use oubliette_protocol::{Error, ProjectId, Result, Scope, WorkspaceId};
use oubliette_store::{AuditEntry, AuditPrincipal, WorkspaceRow};
use serde_json::{Value, json};
use tokio_util::io::ReaderStream;

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    body::{self, BodyError, RequestBody},
    http::HttpDoors,
    reply,
};
use crate::{
    actions::run_blocking,
    auth::Grant,
    visible::parse_id,
    workspace::{
        files::{self, FileOrFolder, WorkspacePath},
        quota, unpack,
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
        let charged = found.and_then(|answer| Ok(doors.app.token_budgets.charge_answer(&grant, answer)?));
        return charged.map_err(|error| error_response(&error));
    };
    let charge = doors.app.token_budgets.request_of(Some(&grant));
    let RequestBody {
        bytes: content,
        charge,
    } = match body::read(&headers, body, charge).await {
        Ok(body) => body,
        Err(BodyError::TooLarge) => return Err(reply::body_too_large(body::MAX_BODY_BYTES)),
        // An incomplete body is not written: the file stays as it was.
        Err(BodyError::Incomplete) => {
            return Err(reply::error(&Error::invalid("the request body is incomplete")));
        }
        Err(BodyError::OverBudget(over)) => return Err(reply::error(&over.into())),
    };
    let mut project = None;
    let outcome = async {
        grant.require(Scope::Write, action)?;
        access::require_csrf_header(&grant, &headers)?;
        let (row, dir) = find_workspace(&doors, &grant, &id).await?;
        let uploads = doors.app.home.uploads_dir(&row.project_id);
        let cap = quota::workspace_cap(&doors.app, &row.project_id).await?;
        project = Some(row.project_id);
        let (app, id) = (doors.app.clone(), row.workspace_id);
        let inner = WorkspacePath::parse(&path)?;
        let size = content.len();
        match method {
            Method::PUT => {
                let shown = inner.to_string();
                run_blocking(move || {
                    let _charge = charge;
                    let mut admitted = None;
                    let admit = |replaced| {
                        let sizes = &app.workspace_sizes;
                        admitted = Some(sizes.admit(&id, &dir, cap, content.len(), replaced)?);
                        Ok(())
                    };
                    files::write_file(&uploads, &dir, &inner, &content, admit)
                })
                .await?;
                Ok(json!({ "path": shown, "size": size }))
            }
            _ => {
                let shown = inner.to_string();
                run_blocking(move || files::remove_path(&dir, &inner)).await?;
                app.workspace_sizes.forget(&id);
                Ok(json!({ "path": shown, "deleted": true }))
            }
        }
    }
    .await;
    let target = format!("{}/{}", truncate_for_audit(&id), truncate_for_audit(&path));
    finish_change(&doors, &grant, action, target, project, outcome).await
}

/// Writes the audit entry of a change and makes its answer.
async fn finish_change(
    doors: &HttpDoors,
    grant: &Grant,
    action: &str,
    target: String,
    project: Option<ProjectId>,
    outcome: Result<Value>,
) -> Result<Response, Response> {
    let entry = AuditEntry {
        principal: AuditPrincipal::of_grant(grant.token_id()),
        session_id: grant.inside().cloned(),
        action: action.into(),
        target: Some(target),
        outcome: outcome.as_ref().err().map_or("ok", |e| e.code.as_str()).into(),
        project_id: project,
        detail: None,
    };
    let written = doors.app.store.audit_append_soon(entry).await;
    // The change is made and stays made, but a missing audit entry is reported as an error.
    let outcome = outcome.and_then(|shape| written.map(|_| shape));
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
        let chunks = doors.app.archives.pack(&row.workspace_id, &dir)?;
        let mut response = reply::untrusted_bytes("application/gzip", Body::from_stream(chunks));
        let name = format!("attachment; filename=\"{}.tar.gz\"", row.workspace_id);
        if let Ok(name) = HeaderValue::from_str(&name) {
            response.headers_mut().insert(header::CONTENT_DISPOSITION, name);
        }
        Ok(response)
    };
    packed.await.map_err(|error: Error| error_response(&error))
}

/// `PUT /api/workspaces/{id}/archive`: puts the files of a tar.gz into the workspace. Unlike other bodies it is written to
/// disk as it comes, and bounded by what the workspace may hold.
pub(crate) async fn put_archive(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Response> {
    const ACTION: &str = "workspace_archive_put";
    let grant = access::authenticate(&doors.app, door, &headers, AcceptedCredentials::BearerOrCookie).await?;
    let mut project = None;
    let outcome = async {
        grant.require(Scope::Write, ACTION)?;
        access::require_csrf_header(&grant, &headers)?;
        let (row, dir) = find_workspace(&doors, &grant, &id).await?;
        project = Some(row.project_id.clone());
        let cap = quota::workspace_cap(&doors.app, &row.project_id).await?;
        let uploads = doors.app.home.uploads_dir(&row.project_id);
        let (app, workspace) = (doors.app.clone(), row.workspace_id.clone());
        let place = app.archive_uploads.take_place(&workspace)?;
        let admit_part = {
            let (app, workspace, dir) = (app.clone(), workspace.clone(), dir.clone());
            move |bytes: u64| {
                let size = usize::try_from(bytes).unwrap_or(usize::MAX);
                app.workspace_sizes.admit(&workspace, &dir, cap, size, 0)
            }
        };
        let archive = unpack::receive(&uploads, body, cap, admit_part).await?;
        let totals = run_blocking(move || {
            // Taken until nothing is unpacked any more, also if the client leaves.
            let _place = place;
            let mut admitted = None;
            let admit = |bytes: u64| {
                let size = usize::try_from(bytes).unwrap_or(usize::MAX);
                admitted = Some(app.workspace_sizes.admit(&workspace, &dir, cap, size, 0)?);
                Ok(())
            };
            let unpacked = unpack::unpack(archive, &uploads, &dir, cap, admit);
            // What it replaced is not known: measured anew at the next upload.
            app.workspace_sizes.forget(&workspace);
            unpacked
        })
        .await?;
        Ok(json!({ "workspace_id": row.workspace_id, "files": totals.files, "bytes": totals.bytes }))
    }
    .await;
    finish_change(&doors, &grant, ACTION, truncate_for_audit(&id), project, outcome).await
}
