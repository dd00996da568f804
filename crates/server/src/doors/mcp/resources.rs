//! Sessions' logs as MCP resources: listing, reading, completion of ids, and subscriptions.

use std::sync::Arc;

use futures::{
    StreamExt as _,
    stream::{self, SelectAll},
};
use oubliette_protocol::{Error, ErrorCode, SessionId};
use oubliette_session::HoldKind;
use oubliette_store::{ListPage, PageRequest, SessionFilter, SessionRow};
use rmcp::{
    ErrorData,
    model::{
        CompleteRequestParams, CompleteResult, CompletionInfo, ListResourceTemplatesResult,
        ListResourcesResult, ReadResourceResult, Reference, Resource, ResourceContents, ResourceTemplate,
    },
    service::SubscriptionContext,
};
use serde_json::json;

use super::event_stream::events_uri;
use crate::{app::App, auth::Grant, presence::PresenceGuard};

/// Maximum size of a log returned by one read, in bytes of JSON; it is exceeded by at most 1000 events.
const MAX_READ_BYTES: usize = 8 * 1024 * 1024;
const MIME: &str = "application/json";
/// The template of the resources' URIs.
const URI_TEMPLATE: &str = "oubliette://sessions/{session_id}/events";
/// The variable in [`URI_TEMPLATE`].
const TEMPLATE_VARIABLE: &str = "session_id";
/// How many sessions, newest first, are searched to complete an id.
const COMPLETION_SCAN_LIMIT: u32 = 1000;

fn to_rpc_error(error: &Error) -> ErrorData {
    let data = Some(error.body());
    match error.code {
        ErrorCode::NotFound => ErrorData::resource_not_found(error.message.clone(), data),
        ErrorCode::InvalidArgument => ErrorData::invalid_params(error.message.clone(), data),
        _ => {
            tracing::error!(error = %error.for_log(), "resource request failed");
            ErrorData::internal_error(error.message.clone(), data)
        }
    }
}

/// The session of a resource's URI, and its log's last index.
pub(crate) async fn resolve_uri(app: &App, grant: &Grant, uri: &str) -> Result<(SessionId, i64), ErrorData> {
    let found = async {
        let id = uri
            .strip_prefix("oubliette://sessions/")
            .and_then(|rest| rest.strip_suffix("/events"));
        let id = id.and_then(|id| id.parse::<SessionId>().ok());
        let id = id.ok_or_else(|| {
            Error::not_found("there is no such resource; they are oubliette://sessions/{session_id}/events")
        })?;
        app.visible_session(grant, &id).await?;
        let last = app.store.events().last_index(&id).await?;
        Ok((id, last))
    };
    found.await.map_err(|e| {
        let mut error = to_rpc_error(&e);
        // MCP puts the URI in this error, so that a client knows which read failed.
        if let Some(data) = &mut error.data {
            data["uri"] = uri.into();
        }
        error
    })
}

/// A page of the sessions the grant may see.
async fn visible_sessions(
    app: &App,
    grant: &Grant,
    page: PageRequest,
) -> Result<ListPage<SessionRow>, ErrorData> {
    let filter = SessionFilter {
        project: grant.project().cloned(),
        ..SessionFilter::default()
    };
    let sessions = app.store.session_list(filter, page).await;
    sessions.map_err(|e| to_rpc_error(&e))
}

/// Lists the logs of all sessions the grant may see.
pub(crate) async fn list(
    app: &App,
    grant: &Grant,
    cursor: Option<String>,
) -> Result<ListResourcesResult, ErrorData> {
    let limit = Some(100);
    let page = visible_sessions(app, grant, PageRequest { limit, cursor }).await?;
    let resources = page.items.iter().map(|row| {
        let title = row
            .title
            .clone()
            .unwrap_or_else(|| format!("Events of {}", row.session_id));
        Resource::new(events_uri(&row.session_id), row.session_id.to_string())
            .with_title(title)
            .with_mime_type(MIME)
    });
    let mut result = ListResourcesResult::with_all_items(resources.collect());
    result.next_cursor = page.next_cursor;
    Ok(result)
}

/// The resource templates: the one of sessions' logs.
pub(crate) fn templates() -> ListResourceTemplatesResult {
    let template = ResourceTemplate::new(URI_TEMPLATE, "session-events")
        .with_title("Session events")
        .with_description("The durable log of one session.")
        .with_mime_type(MIME);
    ListResourceTemplatesResult::with_all_items(vec![template])
}

/// Completes a session id in the URI template; for any other reference nothing is proposed.
pub(crate) async fn complete(
    app: &App,
    grant: &Grant,
    request: &CompleteRequestParams,
) -> Result<CompleteResult, ErrorData> {
    match &request.r#ref {
        Reference::Resource(template)
            if template.uri == URI_TEMPLATE && request.argument.name == TEMPLATE_VARIABLE => {}
        _ => return Ok(CompleteResult::default()),
    }
    let page = visible_sessions(app, grant, PageRequest::first(COMPLETION_SCAN_LIMIT)).await?;
    let ids = page.items.iter().map(|row| row.session_id.to_string());
    let mut ids: Vec<_> = ids.filter(|id| id.starts_with(&request.argument.value)).collect();
    let more = ids.len() > CompletionInfo::MAX_VALUES || page.next_cursor.is_some();
    ids.truncate(CompletionInfo::MAX_VALUES);
    let completion = CompletionInfo::with_pagination(ids, None, more);
    completion
        .map(CompleteResult::new)
        .map_err(|e| ErrorData::internal_error(e, None))
}

/// Reads a session's log.
pub(crate) async fn read(app: &App, grant: &Grant, uri: &str) -> Result<ReadResourceResult, ErrorData> {
    let (id, last) = resolve_uri(app, grant, uri).await?;
    let mut events = Vec::new();
    let (mut since, mut bytes) = (-1, 0);
    while since < last && bytes < MAX_READ_BYTES {
        let more = app
            .store
            .events()
            .read(&id, since, 1000)
            .await
            .map_err(|e| to_rpc_error(&e))?;
        let Some(end) = more.last().map(|e| e.index) else {
            break;
        };
        for event in more {
            let event = json!(event);
            bytes += event.to_string().len();
            events.push(event);
        }
        since = end;
    }
    let text =
        json!({ "session_id": id, "events": events, "last_index": since, "more": since < last }).to_string();
    Ok(ReadResourceResult::new(vec![
        ResourceContents::text(text, uri).with_mime_type(MIME),
    ]))
}

/// Notifies the client of new events in the subscribed logs, until it disconnects, the token ends or the server stops.
pub(crate) async fn listen(
    app: &Arc<App>,
    grant: &Grant,
    subscription: SubscriptionContext,
) -> Result<(), ErrorData> {
    let uris = subscription
        .accepted()
        .resource_subscriptions
        .clone()
        .unwrap_or_default();
    let mut followed = SelectAll::new();
    let mut presence = Vec::new();
    for uri in uris {
        let (id, last) = resolve_uri(app, grant, &uri).await?;
        let present = PresenceGuard::where_session_runs(app, grant, &id, HoldKind::Stream).await;
        presence.push(present.map_err(|e| to_rpc_error(&e))?);
        // The subscription was acknowledged before the log's last index was read here. The client may have neither read
        // nor be notified of an event in between, so a log that is not empty is signalled at once.
        let missed = (last >= 0).then(|| uri.clone());
        let changes = app.store.events().follow(&id, last).map(move |_| uri.clone());
        followed.push(stream::iter(missed).chain(changes).boxed());
    }
    loop {
        tokio::select! {
            () = subscription.cancelled() => return Ok(()),
            () = app.stopping.cancelled() => {
                presence.into_iter().for_each(PresenceGuard::release_as_answered);
                return Ok(());
            }
            () = app.auth.wait_until_ended(grant) => return Ok(()),
            Some(uri) = followed.next(), if !followed.is_empty() => {
                if subscription.sink().notify_resource_updated(uri).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}
