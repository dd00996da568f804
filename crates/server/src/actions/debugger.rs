//! `debugger_events`: the debugger's log of context builds, tool calls, blocked calls and health changes.

use std::{sync::Arc, time::Duration};

use oubliette_protocol::{Result, Scope, SessionId, Slug, debug::DebugEvent};
use oubliette_store::DebugFilter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect};

/// `debugger_events`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DebuggerEvents {
    /// Only events of this session (`gogol_…`). Absent: of all your token can see.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Only events of the agent with this slug. Absent: of all.
    #[serde(default)]
    pub agent: Option<Slug>,
    /// Only events of these kinds, for example `["tool_call", "tool_blocked"]`. Absent: all kinds.
    #[serde(default)]
    pub kinds: Option<Vec<String>>,
    /// Return events after this index, not the one at it; the index counts over the whole server. Default: -1, from
    /// the first.
    #[serde(default)]
    pub since_index: Option<i64>,
    /// Maximum number of events to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub max_events: Option<u32>,
    /// How long to wait for a first event if there is none yet, in milliseconds, 0 to 50000. Default: 0.
    #[serde(default)]
    pub wait_ms: Option<u32>,
}

/// Result of `debugger_events`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DebuggerPage {
    /// The events, oldest first.
    events: Vec<Arc<DebugEvent>>,
    /// The index of the last event, or `since_index` when there is none.
    last_index: i64,
}

impl ActionHandler for DebuggerEvents {
    type Output = DebuggerPage;

    const NAME: &'static str = "debugger_events";
    const DESCRIPTION: &'static str = "Read what happened behind the scenes: context builds and teardowns, tool calls and blocks, health changes.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let max = self.max_events.unwrap_or(100) as usize;
        let wait = Duration::from_millis(self.wait_ms.unwrap_or(0).into());
        oubliette_session::check_events_bounds(max, wait)?;
        if let Some(id) = &self.session_id {
            call.app.visible_session(call.grant, id).await?;
        }
        let filter = DebugFilter {
            session: self.session_id,
            agent: self.agent,
            kinds: self.kinds,
            project: call.grant.project().cloned(),
        };
        let since = self.since_index.unwrap_or(-1);
        let log = call.app.store.debugger();
        // So that the answer has every event recorded before the request.
        log.flush().await;
        let poll = log.poll(&filter, since.max(-1), max, wait);
        let events = tokio::select! {
            events = poll => events?,
            error = call.abandoned() => return Err(error),
            () = call.app.stopping.cancelled() => Vec::new(),
        };
        let last_index = events.last().map_or(since, |event| event.index);
        Ok(DebuggerPage { events, last_index })
    }
}
