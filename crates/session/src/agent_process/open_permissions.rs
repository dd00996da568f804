//! Permission requests of an agent that a person answers (`permissions: "ask"`): each is an approval.

use std::sync::Arc;

use agent_client_protocol::v1::schema::{RequestPermissionRequest, RequestPermissionResponse};
use oubliette_protocol::{
    Slug,
    approval::{ApprovalSource, ApprovalStatus},
    debug::shorten_texts,
};
use oubliette_relay::RpcId;
use oubliette_tools::{CallToApprove, DebugSink, ToolPlane};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    permission::{self, CheckedByPlane, PolicyAnswer},
    terminal_escapes::{strip_escapes, strip_escapes_in},
};
use crate::{agent_process::event_bounds::truncate_text, approvals::SessionApprovals};

/// Maximum number of an agent's requests that wait for a person. Further ones are answered `cancelled`.
const MAX_OPEN: usize = 64;
/// The longest name of what an agent asks permission for, in bytes.
const MAX_TITLE_BYTES: usize = 200;

/// Who answers an agent's permission requests.
#[derive(Clone)]
pub(crate) struct PermissionApprover {
    pub(crate) approvals: Arc<SessionApprovals>,
    pub(crate) plane: Arc<ToolPlane>,
    pub(crate) agent: Slug,
    /// Records each request and its answer.
    pub(crate) debug: Arc<dyn DebugSink>,
}

/// An answer to a permission request of the agent.
pub(crate) type PermissionAnswer = (RpcId, RequestPermissionResponse);

/// The permission requests of one agent process that wait for a person. Dropping this cancels them.
pub(crate) struct OpenPermissions {
    approver: PermissionApprover,
    /// Boxed: the channel has places for many answers from the start, and most agents never ask.
    answers: mpsc::Receiver<Box<PermissionAnswer>>,
    answered: mpsc::Sender<Box<PermissionAnswer>>,
    gone: CancellationToken,
    _cancel_when_dropped: DropGuard,
}

impl OpenPermissions {
    pub(crate) fn new(approver: PermissionApprover) -> Self {
        let (answered, answers) = mpsc::channel(MAX_OPEN);
        let gone = CancellationToken::new();
        Self {
            approver,
            answers,
            answered,
            _cancel_when_dropped: gone.clone().drop_guard(),
            gone,
        }
    }

    /// Asks a person about a request for `tool`; the answer comes from [`next`](Self::next). Gives the answer at once if too many wait.
    pub(crate) fn ask(
        &self,
        id: RpcId,
        request: RequestPermissionRequest,
        tool: String,
    ) -> Option<PermissionAnswer> {
        // A place in the channel is reserved for the answer, so that sending it never waits.
        let Ok(place) = self.answered.clone().try_reserve_owned() else {
            let (answer, cancelled) = permission::select_option(&request, PolicyAnswer::Cancelled);
            let approver = &self.approver;
            permission::record(
                &*approver.debug,
                &approver.agent,
                tool,
                CheckedByPlane::No,
                answer,
            );
            return Some((id, cancelled));
        };
        let (approver, gone) = (self.approver.clone(), self.gone.clone());
        tokio::spawn(async move {
            let (answer, response) = approver.answer(&request, &gone).await;
            permission::record(
                &*approver.debug,
                &approver.agent,
                tool,
                CheckedByPlane::No,
                answer,
            );
            place.send(Box::new((id, response)));
        });
        None
    }

    /// The next answer. Cancel-safe.
    pub(crate) async fn next(&mut self) -> PermissionAnswer {
        match self.answers.recv().await {
            Some(answer) => *answer,
            None => std::future::pending().await,
        }
    }
}

impl PermissionApprover {
    async fn answer(
        &self,
        request: &RequestPermissionRequest,
        gone: &CancellationToken,
    ) -> (PolicyAnswer, RequestPermissionResponse) {
        let fields = &request.tool_call.fields;
        let title = fields.title.as_deref().or(fields.name.as_deref());
        let title = strip_escapes(title.unwrap_or("permission")).into_owned();
        let mut title = truncate_text(title, MAX_TITLE_BYTES);
        self.plane.mask_text(&mut title);
        let mut arguments = json!({ "toolCall": request.tool_call, "options": request.options });
        strip_escapes_in(&mut arguments);
        self.plane.mask(&mut arguments);
        let call = CallToApprove {
            agent: self.agent.clone(),
            tool: title.clone(),
            canonical: title,
            source: ApprovalSource::Agent,
            arguments: shorten_texts(arguments),
            rules: vec![json!({ "permissions": "ask" })],
        };
        let decision = match self.approvals.ask(call, gone, |_| {}).await {
            Ok(decision) => decision.map_or(ApprovalStatus::Allowed, |decision| decision.decision),
            Err(error) => {
                tracing::warn!(error = %error.for_log(), "an agent's permission request could not be asked about");
                ApprovalStatus::Cancelled
            }
        };
        let wanted = match decision {
            ApprovalStatus::Allowed => PolicyAnswer::Allow,
            ApprovalStatus::Denied | ApprovalStatus::Expired => PolicyAnswer::Deny,
            ApprovalStatus::Cancelled | ApprovalStatus::Pending => PolicyAnswer::Cancelled,
        };
        permission::select_option(request, wanted)
    }
}
