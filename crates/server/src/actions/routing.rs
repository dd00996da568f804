//! Which actions only the server can perform that runs their session. All others are answered from the database, by any
//! server of a cluster.

use super::Action;
use crate::{
    auth::Grant,
    hop::{
        IfUnowned, OwnedTarget,
        pass_on::{ActionRoute, IfUnreachable},
    },
};

/// Where an action has to be performed; `None`: anywhere.
pub(super) fn route<'a>(action: &'a Action, grant: &'a Grant) -> Option<ActionRoute<'a>> {
    use OwnedTarget::{Approval, Session};
    let route = |target, unowned, unreachable| {
        Some(ActionRoute {
            target,
            unowned,
            unreachable,
        })
    };
    // Starts or changes what runs: a session that no server runs is this one's from now on.
    let runs = |session| route(Session(session), IfUnowned::Claim, IfUnreachable::Wait);
    // Changes what runs, if anything does.
    let acts = |session| route(Session(session), IfUnowned::Leave, IfUnreachable::Wait);
    // The server that runs it knows more than the database.
    let shows = |session| route(Session(session), IfUnowned::Leave, IfUnreachable::AnswerHere);
    match action {
        // From inside, a message without a session starts a child, which is where its parent is.
        Action::SessionMessage(message) => message.session_id.as_ref().or(grant.inside()).and_then(runs),
        Action::SessionEnd(end) => runs(&end.session_id),
        Action::SessionDelete(delete) => runs(&delete.session_id),
        Action::SessionSwitchAgent(switch) => runs(&switch.session_id),
        Action::ToolCall(call) => runs(&call.session_id),
        Action::ToolServerRestart(restart) => runs(&restart.session_id),
        Action::ToolListing(list) => list.session_id.as_ref().and_then(runs),
        Action::ToolExplain(explain) => explain.session_id.as_ref().and_then(runs),
        Action::SessionCancel(cancel) => acts(&cancel.session_id),
        Action::SessionQueueRemove(remove) => acts(&remove.session_id),
        Action::CallerToolResponse(response) => acts(&response.session_id),
        // Of a session that no server runs, the approval is cancelled when one claims it.
        Action::ApprovalDecide(decide) => route(
            Approval(&decide.approval_id),
            IfUnowned::Claim,
            IfUnreachable::Wait,
        ),
        Action::SessionGet(get) => shows(&get.session_id),
        Action::SessionQueueList(list) => shows(&list.session_id),
        // The log is in the database, but who reads it may be a caller, which is present where the session runs: a poll that
        // waits has to be there from its beginning to its end.
        Action::SessionEvents(events) if events.wait_ms.unwrap_or(0) > 0 => route(
            Session(&events.session_id),
            IfUnowned::Claim,
            IfUnreachable::AnswerHere,
        ),
        Action::SessionEvents(events) => shows(&events.session_id),
        Action::SessionList(_)
        | Action::ApprovalList(_)
        | Action::ProjectCreate(_)
        | Action::ProjectUpdate(_)
        | Action::ProjectList(_)
        | Action::ProjectGet(_)
        | Action::ProjectDelete(_)
        | Action::WorkspaceCreate(_)
        | Action::WorkspaceList(_)
        | Action::WorkspaceDelete(_)
        | Action::WorkspaceDiff(_)
        | Action::DebuggerEvents(_)
        | Action::FiguresReport(_)
        | Action::AgentList(_)
        | Action::AgentGet(_)
        | Action::AgentPut(_)
        | Action::AgentDelete(_)
        | Action::PresetList(_)
        | Action::CatalogList(_)
        | Action::CatalogGet(_)
        | Action::CatalogPut(_)
        | Action::CatalogDelete(_)
        | Action::CatalogStatus(_)
        | Action::CatalogTest(_)
        | Action::ProgramInstall(_)
        | Action::ProgramList(_)
        | Action::ProgramRemove(_)
        | Action::ToolAdd(_)
        | Action::TokenCreate(_)
        | Action::TokenList(_)
        | Action::TokenRevoke(_)
        | Action::AuditList(_)
        | Action::UsageReporting(_)
        | Action::LibraryList(_)
        | Action::LibraryRead(_)
        | Action::LibraryPush(_)
        | Action::ServerList(_)
        | Action::ServerInfo(_)
        | Action::Doctor(_) => None,
    }
}
