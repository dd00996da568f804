//! Sessions' logs as MCP resources: listed, read, and listened to.

use std::sync::Arc;

use futures::{
    StreamExt as _,
    stream::{self, SelectAll},
};
use oubliette_protocol::{Error, ErrorCode, SessionId};
use oubliette_session::Kind;
use oubliette_store::{Page, SessionFilter, SessionRow};
use rmcp::{
    ErrorData,
    model::{
        CompleteRequestParams, CompleteResult, CompletionInfo, ListResourceTemplatesResult,
        ListResourcesResult, ReadResourceResult, Reference, Resource, ResourceContents, ResourceTemplate,
    },
    service::SubscriptionContext,
};
use serde_json::json;

use super::push::uri;
use crate::{app::App, auth::Grant, presence::Held};

/// The most of a log that one read gives, in bytes of JSON.
const MOST_BYTES: usize = 8 * 1024 * 1024;
const MIME: &str = "application/json";
/// The shape of URIs, and what varies in it.
const TEMPLATE: &str = "oubliette://sessions/{session_id}/events";
const VARIES: &str = "session_id";
/// How many sessions, newest first, a completion looks among.
const LOOKED_AT: u32 = 1000;

fn refused(error: &Error) -> ErrorData {
    let data = Some(error.body());
    match error.code {
        ErrorCode::NotFound => ErrorData::resource_not_found(error.message.clone(), data),
        ErrorCode::InvalidArgument => ErrorData::invalid_params(error.message.clone(), data),
        _ => {
            tracing::error!(error = %error.for_log(), "resource");
            ErrorData::internal_error(error.message.clone(), data)
        }
    }
}

/// A session within reach.
async fn session(app: &App, grant: &Grant, id: &SessionId) -> Result<SessionRow, Error> {
    let row = app
        .store
        .session_get(id)
        .await?
        .filter(|row| grant.principal().sees(&row.project_id));
    row.ok_or_else(|| Error::not_found(format!("there is no session {id}")))
}

/// The session of a URI, and how far its log goes.
pub async fn find(app: &App, grant: &Grant, uri: &str) -> Result<(SessionId, i64), ErrorData> {
    let found = async {
        let id = uri
            .strip_prefix("oubliette://sessions/")
            .and_then(|rest| rest.strip_suffix("/events"));
        let id = id.and_then(|id| id.parse::<SessionId>().ok());
        let id = id.ok_or_else(|| {
            Error::not_found("there is no such resource; they are oubliette://sessions/{session_id}/events")
        })?;
        session(app, grant, &id).await?;
        let last = app.store.events().last_index(&id).await?;
        Ok((id, last))
    };
    found.await.map_err(|e| {
        let mut refused = refused(&e);
        // Which of many reads it was.
        if let Some(data) = &mut refused.data {
            data["uri"] = uri.into();
        }
        refused
    })
}

/// Every visible session's log.
pub async fn list(
    app: &App,
    grant: &Grant,
    cursor: Option<String>,
) -> Result<ListResourcesResult, ErrorData> {
    let filter = SessionFilter {
        project: grant.project().cloned(),
        ..SessionFilter::default()
    };
    let page = app
        .store
        .session_list(
            filter,
            Page {
                limit: Some(100),
                cursor,
            },
        )
        .await
        .map_err(|e| refused(&e))?;
    let resources = page.items.iter().map(|row| {
        let title = row
            .title
            .clone()
            .unwrap_or_else(|| format!("Events of {}", row.session_id));
        Resource::new(uri(&row.session_id), row.session_id.to_string())
            .with_title(title)
            .with_mime_type(MIME)
    });
    let mut result = ListResourcesResult::with_all_items(resources.collect());
    result.next_cursor = page.next_cursor;
    Ok(result)
}

/// The shape of their URIs.
pub fn templates() -> ListResourceTemplatesResult {
    let template = ResourceTemplate::new(TEMPLATE, "session-events")
        .with_title("Session events")
        .with_description("The durable log of one session.")
        .with_mime_type(MIME);
    ListResourceTemplatesResult::with_all_items(vec![template])
}

/// Sessions whose ids begin like this one. Of anything else there is nothing to propose.
pub async fn complete(
    app: &App,
    grant: &Grant,
    request: &CompleteRequestParams,
) -> Result<CompleteResult, ErrorData> {
    match &request.r#ref {
        Reference::Resource(template) if template.uri == TEMPLATE && request.argument.name == VARIES => {}
        _ => return Ok(CompleteResult::default()),
    }
    let filter = SessionFilter {
        project: grant.project().cloned(),
        ..SessionFilter::default()
    };
    let page = app
        .store
        .session_list(
            filter,
            Page {
                limit: Some(LOOKED_AT),
                cursor: None,
            },
        )
        .await
        .map_err(|e| refused(&e))?;
    let ids = page.items.iter().map(|row| row.session_id.to_string());
    let mut ids: Vec<_> = ids.filter(|id| id.starts_with(&request.argument.value)).collect();
    let more = ids.len() > CompletionInfo::MAX_VALUES || page.next_cursor.is_some();
    ids.truncate(CompletionInfo::MAX_VALUES);
    let completion = CompletionInfo::with_pagination(ids, None, more);
    completion
        .map(CompleteResult::new)
        .map_err(|e| ErrorData::internal_error(e, None))
}

/// A log.
pub async fn read(app: &App, grant: &Grant, uri: &str) -> Result<ReadResourceResult, ErrorData> {
    let (id, last) = find(app, grant, uri).await?;
    let mut events = Vec::new();
    let (mut since, mut bytes) = (-1, 0);
    while since < last && bytes < MOST_BYTES {
        let more = app
            .store
            .events()
            .read(&id, since, 1000)
            .await
            .map_err(|e| refused(&e))?;
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

/// Signals that a log went on, until the client or the token goes.
pub async fn listen(
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
    let mut held = Vec::new();
    for uri in uris {
        let (id, last) = find(app, grant, &uri).await?;
        held.push(Held::request(app, grant, &id, None, Kind::Stream));
        // The client was told that it listens before this place in the log was found. What came in between
        // it may neither have read nor hear of later, so a log that holds anything is signalled at once.
        let missed = (last >= 0).then(|| uri.clone());
        let changes = app.store.events().follow(&id, last).map(move |_| uri.clone());
        followed.push(stream::iter(missed).chain(changes).boxed());
    }
    loop {
        tokio::select! {
            () = subscription.cancelled() => return Ok(()),
            () = app.stopping.cancelled() => {
                held.into_iter().for_each(Held::answered);
                return Ok(());
            }
            () = app.auth.ended(grant) => return Ok(()),
            Some(uri) = followed.next(), if !followed.is_empty() => {
                if subscription.sink().notify_resource_updated(uri).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}
