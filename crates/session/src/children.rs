//! Child sessions, which the agent of another session starts. A child runs the parent's agent or one that
//! agent's definition lists, is bound by the parent's limits, and ends with it.

use std::collections::HashSet;

use oubliette_protocol::{Error, Principal, Result, SessionId, Slug, event::SessionStatus};
use oubliette_store::{ProjectRow, READ_BYTES, SessionRow};

use crate::{
    Sessions,
    events::MAX_EVENTS,
    live::TaskCommand,
    request::{ChildEvents, EventsQuery},
};

/// The session whose agent starts another.
pub(crate) struct ParentSession {
    pub(crate) row: SessionRow,
}

impl ParentSession {
    /// Finds it and checks that it has not ended and may start sessions one level deeper.
    pub(crate) async fn find(sessions: &Sessions, id: &SessionId, project: &ProjectRow) -> Result<Self> {
        let row = sessions.deps.store.session_get(id).await?;
        let row = row.ok_or_else(|| Error::not_found(format!("there is no session {id}")))?;
        if row.status == SessionStatus::Ended {
            return Err(Error::conflict("the session that asks has ended"));
        }
        let most = sessions.max_depth_below(&row, project).await?;
        match u64::from(row.depth) < most {
            true => Ok(Self { row }),
            false => Err(Error::limit_exceeded(format!(
                "this session is {} levels deep; sessions start others at most {most} levels deep",
                row.depth
            ))),
        }
    }

    /// The agent of a child: `named` if the parent agent's definition lists it, else the parent's own.
    pub(crate) fn agent_for_child(&self, sessions: &Sessions, named: Option<&Slug>) -> Result<Slug> {
        let own = sessions
            .in_memory(&self.row.session_id)
            .map(|live| live.state.borrow().agent.clone());
        let own = own.unwrap_or_else(|| self.row.agent.clone());
        let Some(named) = named.filter(|named| **named != own) else {
            return Ok(own);
        };
        let definition = &sessions.deps.library.agent(&own)?.definition;
        match definition.children.contains(named) {
            true => Ok(named.clone()),
            false => Err(Error::not_allowed(format!(
                "agent {own} may not start agent {named}: its definition does not list it under children"
            ))),
        }
    }
}

impl Sessions {
    /// The greatest depth allowed below a session: the lowest `max_depth` of its project and of the projects
    /// of all its ancestors. Otherwise starting a child in a new project would raise the limit.
    async fn max_depth_below(&self, from: &SessionRow, project: &ProjectRow) -> Result<u64> {
        let most = |project: &ProjectRow| {
            let named = project.limits.get("max_depth");
            let named = named.and_then(serde_json::Value::as_u64);
            named.unwrap_or(u64::from(self.deps.config.load().max_depth))
        };
        let mut least = most(project);
        let mut seen = HashSet::from([project.project_id.clone()]);
        for row in self.deps.store.session_ancestry(&from.session_id).await? {
            if seen.insert(row.project_id.clone()) {
                least = least.min(most(&self.deps.project(&row.project_id).await?));
            }
        }
        Ok(least)
    }

    /// Fails when `target` is `asking` or an ancestor of it: that turn may be waiting for this one, and
    /// neither would end.
    pub(crate) async fn refuse_circular_wait(&self, asking: &SessionId, target: &SessionId) -> Result<()> {
        let ancestry = self.deps.store.session_ancestry(asking).await?;
        match asking == target || ancestry.iter().any(|row| row.session_id == *target) {
            true => Err(Error::invalid(
                "wait: a session cannot wait for itself or for one that started it",
            )),
            false => Ok(()),
        }
    }

    /// Ends every descendant of a session, parents before children.
    pub(crate) async fn end_children(&self, id: &SessionId) -> Result<()> {
        for child in self.descendants(id).await? {
            if child.status == SessionStatus::Ended {
                continue;
            }
            match self.load(&child.session_id).await {
                Ok(live) => drop(live.send_command(TaskCommand::End).await),
                Err(error) => {
                    tracing::debug!(child = %child.session_id, %error, "ending a child session failed")
                }
            }
        }
        Ok(())
    }

    /// All descendants of a session, parents before children.
    pub(crate) async fn descendants(&self, id: &SessionId) -> Result<Vec<SessionRow>> {
        let Some(top) = self.deps.store.session_get(id).await? else {
            return Ok(Vec::new());
        };
        let tree = self.deps.store.session_tree(&top.root_id).await?;
        let mut below = HashSet::from([top.session_id]);
        // The tree is ordered oldest first, so a session comes after its parent.
        let under = |row: &SessionRow| {
            let is = row
                .parent_id
                .as_ref()
                .is_some_and(|parent| below.contains(parent));
            if is {
                below.insert(row.session_id.clone());
            }
            is
        };
        Ok(tree.into_iter().filter(under).collect())
    }

    /// The logs of all descendants of a session: the first `max_events` of each, and in all at most [`MAX_EVENTS`] with
    /// [`READ_BYTES`] bytes of JSON: an agent can start many sessions and send each large messages. A descendant for which no room was left is listed with fewer or no events; the rest can be
    /// read with its own `session_events`.
    pub(crate) async fn child_events(
        &self,
        principal: &Principal,
        query: &EventsQuery,
    ) -> Result<Vec<ChildEvents>> {
        let mut children = Vec::new();
        let (mut room, mut room_bytes) = (MAX_EVENTS, READ_BYTES);
        for row in self.descendants(&query.session_id).await? {
            if !principal.sees(&row.project_id) {
                continue;
            }
            let most = query.max_events.min(room);
            let (events, bytes) = match most {
                0 => (Vec::new(), 0),
                most => {
                    let log = self.deps.store.events();
                    log.read_within(&row.session_id, -1, most, room_bytes).await?
                }
            };
            room -= events.len();
            room_bytes = room_bytes.saturating_sub(bytes);
            let last_index = events.last().map_or(-1, |event| event.index);
            children.push(ChildEvents {
                session_id: row.session_id,
                events,
                last_index,
            });
        }
        Ok(children)
    }
}
