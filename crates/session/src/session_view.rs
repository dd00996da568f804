//! `session_get` and `session_list`: sessions as they are shown.

use std::collections::HashMap;

use oubliette_protocol::{
    Principal, Result, Scope, SessionId, TokenId, event::SessionStatus, usage::UsageTotals,
};
use oubliette_store::{PageRequest, SessionFilter, SessionRow};

use crate::{
    Sessions,
    ports::no_project,
    relay_socket,
    request::{SessionCreator, SessionListQuery, SessionPage, SessionView},
    sandbox_image,
};

/// How many pending approvals of a session are shown with it; `approval_list` has all.
const MAX_SHOWN_APPROVALS: u32 = 1_000;

impl Sessions {
    /// Returns a session.
    pub async fn get(&self, principal: &Principal, id: &SessionId) -> Result<SessionView> {
        let row = self.visible_row(principal, id).await?;
        let store = &self.deps.store;
        let mut usage = store.usage_of_sessions(std::slice::from_ref(id)).await?;
        let creators = self.creators(std::slice::from_ref(&row)).await?;
        let mut view = self.view(row, principal, usage.remove(id).unwrap_or_default(), &creators);
        view.pending_approvals = Some(store.approvals_pending(id, MAX_SHOWN_APPROVALS).await?);
        let shown = self.in_memory(id).and_then(|live| live.shown_tools.names());
        view.tools_listed = shown.map(|names| {
            let mut names: Vec<String> = names.iter().cloned().collect();
            names.sort();
            names
        });
        Ok(view)
    }

    /// Lists the sessions a principal may see, newest first.
    pub async fn list(&self, principal: &Principal, query: SessionListQuery) -> Result<SessionPage> {
        if let Some(project) = query
            .project_id
            .as_ref()
            .filter(|project| !principal.sees(project))
        {
            return Err(no_project(project));
        }
        let project = query.project_id.or_else(|| principal.project.clone());
        let filter = SessionFilter {
            project,
            status: query.status,
            ..SessionFilter::default()
        };
        let page = PageRequest {
            limit: query.limit,
            cursor: query.cursor,
        };
        let rows = self.deps.store.session_list(filter, page).await?;
        let ids: Vec<_> = rows.items.iter().map(|row| row.session_id.clone()).collect();
        let mut usage = self.deps.store.usage_of_sessions(&ids).await?;
        let creators = self.creators(&rows.items).await?;
        let view = |row: SessionRow| {
            let used = usage.remove(&row.session_id).unwrap_or_default();
            self.view(row, principal, used, &creators)
        };
        let sessions = rows.items.into_iter().map(view).collect();
        Ok(SessionPage {
            sessions,
            next_cursor: rows.next_cursor,
        })
    }

    /// The names of the tokens that started these sessions.
    async fn creators(&self, rows: &[SessionRow]) -> Result<HashMap<TokenId, String>> {
        let mut tokens: Vec<_> = rows.iter().filter_map(|row| row.created_by.clone()).collect();
        tokens.sort_unstable();
        tokens.dedup();
        self.deps.store.token_names(&tokens).await
    }

    fn view(
        &self,
        row: SessionRow,
        principal: &Principal,
        usage: UsageTotals,
        creators: &HashMap<TokenId, String>,
    ) -> SessionView {
        let created_by = match (&row.created_by, &row.parent_id) {
            (Some(token), _) => Some(SessionCreator {
                token_id: Some(token.clone()),
                name: creators.get(token).cloned(),
            }),
            (None, None) => Some(SessionCreator {
                token_id: None,
                name: Some("owner".into()),
            }),
            // Started by the agent of the session above it, through a base tool.
            (None, Some(_)) => None,
        };
        let shown = principal.scope == Scope::Admin && row.status != SessionStatus::Ended;
        let live = self.in_memory(&row.session_id);
        let log_error = live.and_then(|live| live.state.borrow().log_error.clone());
        let relay_socket = shown.then(|| relay_socket::path(&self.deps.home, &row.session_id));
        SessionView {
            session_id: row.session_id,
            project_id: row.project_id,
            workspace_id: row.workspace_id,
            agent: row.agent,
            status: row.status,
            reason: log_error.or(row.reason),
            parent_id: row.parent_id,
            root_id: row.root_id,
            depth: row.depth,
            turn: row.turn,
            title: row.title,
            isolation: row.isolation,
            images: row.images.as_deref().and_then(sandbox_image::pinned_images),
            created_by,
            created_at: row.created_at,
            updated_at: row.updated_at,
            usage,
            relay_socket,
            pending_approvals: None,
            tools_listed: None,
        }
    }
}
