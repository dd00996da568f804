//! Answers an agent's permission requests. A request about a tool of the tool plane is allowed: the plane checks the call
//! itself. All others are answered by the policy in the agent's definition. Whatever it allows, the agent stays within
//! its sandbox.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use agent_client_protocol::v1::schema::{
    PermissionOption, PermissionOptionKind, RequestPermissionOutcome, RequestPermissionRequest,
    RequestPermissionResponse, SelectedPermissionOutcome, SessionUpdate, ToolKind,
};
use oubliette_protocol::{Slug, agent::PermissionPolicy, debug::DebugBody};
use oubliette_tools::{DebugSink, ToolPlane};

use super::{
    event_bounds::{bounded_id, truncate_text},
    terminal_escapes::strip_escapes,
    tool_name::CallDescription,
};
use crate::shown_tools::ShownTools;

/// The most calls of a turn whose tool is remembered until the agent asks about them.
const MAX_ANNOUNCED_CALLS: usize = 1_000;
/// The longest name of a tool in the debugger, in bytes.
const MAX_TOOL_BYTES: usize = 256;

/// How a permission request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PolicyAnswer {
    Allow,
    Deny,
    /// The turn is being cancelled, or the agent offers no option that fits.
    Cancelled,
}

impl PolicyAnswer {
    fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Whether a request is about a tool whose calls the tool plane checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CheckedByPlane {
    Yes,
    No,
}

/// Decides about a request; `None` when a person is to be asked.
fn decide(policy: PermissionPolicy, gated: CheckedByPlane) -> Option<PolicyAnswer> {
    match (gated, policy) {
        (CheckedByPlane::Yes, _) | (CheckedByPlane::No, PermissionPolicy::Allow) => Some(PolicyAnswer::Allow),
        (CheckedByPlane::No, PermissionPolicy::Deny) => Some(PolicyAnswer::Deny),
        (CheckedByPlane::No, PermissionPolicy::Ask) => None,
    }
}

/// What is done about a request.
pub(crate) enum PermissionDecision {
    /// It is answered at once.
    Answered(RequestPermissionResponse),
    /// A person is asked about this tool.
    AskAbout(String),
}

/// Answers the permission requests of one agent process and records them in the debugger.
pub(crate) struct PermissionResponder {
    pub(crate) policy: PermissionPolicy,
    pub(crate) agent: Slug,
    pub(crate) debug: Arc<dyn DebugSink>,
    pub(crate) plane: Arc<ToolPlane>,
    pub(crate) listing: Arc<ShownTools>,
    /// The tool plane's tools of calls that were announced in this turn, by call id: some agents name the server only
    /// there, and not in the request.
    announced: HashMap<String, String>,
    /// The ids of calls that were announced as commands in this turn: some agents say the kind only there.
    commands: HashSet<String>,
}

impl PermissionResponder {
    pub(crate) fn new(
        policy: PermissionPolicy,
        agent: Slug,
        debug: Arc<dyn DebugSink>,
        plane: Arc<ToolPlane>,
        listing: Arc<ShownTools>,
    ) -> Self {
        Self {
            policy,
            agent,
            debug,
            plane,
            listing,
            announced: HashMap::new(),
            commands: HashSet::new(),
        }
    }

    /// Forgets the calls of the turn before.
    pub(crate) fn begin_turn(&mut self) {
        self.announced.clear();
        self.commands.clear();
    }

    /// Remembers the tool of an announced call, and whether it is a command.
    pub(crate) fn note_update(&mut self, update: &SessionUpdate) {
        let (id, call) = match update {
            SessionUpdate::ToolCall(call) => (&call.tool_call_id, CallDescription::from(call)),
            SessionUpdate::ToolCallUpdate(update) => (&update.tool_call_id, CallDescription::from(update)),
            _ => return,
        };
        if call.kind() == Some(ToolKind::Execute) && self.commands.len() < MAX_ANNOUNCED_CALLS {
            self.commands.insert(bounded_id(&id.0).into_owned());
        }
        if let Some(listed) = self.listing.names()
            && let Some(tool) = call.gated_tool(&listed)
            && self.announced.len() < MAX_ANNOUNCED_CALLS
        {
            self.announced.insert(bounded_id(&id.0).into_owned(), tool);
        }
    }

    /// Decides about a request, and records the answer unless a person is to give it.
    pub(crate) fn answer(&self, request: &RequestPermissionRequest, cancelling: bool) -> PermissionDecision {
        let id = bounded_id(&request.tool_call.tool_call_id.0);
        let call = CallDescription::from(&request.tool_call);
        let call = match self.commands.contains(&*id) {
            true => call.with_kind(Some(ToolKind::Execute)),
            false => call,
        };
        let announced = || self.announced.get(&*id).cloned();
        let gated_tool = self
            .listing
            .names()
            .and_then(|listed| call.gated_tool(&listed))
            .or_else(announced);
        let (gated, tool) = match gated_tool {
            Some(tool) => (CheckedByPlane::Yes, tool),
            None => (CheckedByPlane::No, call.tool().unwrap_or_default()),
        };
        let mut tool = truncate_text(strip_escapes(&tool).into_owned(), MAX_TOOL_BYTES);
        self.plane.mask_text(&mut tool);
        let wanted = match cancelling {
            true => Some(PolicyAnswer::Cancelled),
            false => decide(self.policy, gated),
        };
        let Some(wanted) = wanted else {
            return PermissionDecision::AskAbout(tool);
        };
        let (answer, response) = select_option(request, wanted);
        record(&*self.debug, &self.agent, tool, gated, answer);
        PermissionDecision::Answered(response)
    }
}

/// Records a request and its answer in the debugger.
pub(crate) fn record(
    debug: &dyn DebugSink,
    agent: &Slug,
    tool: String,
    gated: CheckedByPlane,
    answer: PolicyAnswer,
) {
    let event = DebugBody::Permission {
        tool,
        gated: gated == CheckedByPlane::Yes,
        answer: answer.as_str().to_owned(),
    };
    debug.record(Some(agent), event);
}

/// Selects the agent's option that fits the answer; `cancelled` when none does.
pub(crate) fn select_option(
    request: &RequestPermissionRequest,
    answer: PolicyAnswer,
) -> (PolicyAnswer, RequestPermissionResponse) {
    use PermissionOptionKind::{AllowAlways, AllowOnce, RejectAlways, RejectOnce};
    // The narrower option first: after "once" the agent asks again the next time.
    let kinds: &[PermissionOptionKind] = match answer {
        PolicyAnswer::Allow => &[AllowOnce, AllowAlways],
        PolicyAnswer::Deny => &[RejectOnce, RejectAlways],
        PolicyAnswer::Cancelled => &[],
    };
    let find = |kind: &PermissionOptionKind| {
        let mut options = request.options.iter();
        options.find(|option: &&PermissionOption| option.kind == *kind)
    };
    match kinds.iter().find_map(find) {
        Some(option) => {
            let selected = SelectedPermissionOutcome::new(option.option_id.clone());
            let outcome = RequestPermissionOutcome::Selected(selected);
            (answer, RequestPermissionResponse::new(outcome))
        }
        None => {
            let cancelled = RequestPermissionResponse::new(RequestPermissionOutcome::Cancelled);
            (PolicyAnswer::Cancelled, cancelled)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn select(options: Value, answer: PolicyAnswer) -> Value {
        let request = json!({"sessionId":"s","toolCall":{"toolCallId":"c"},"options":options});
        let request = serde_json::from_value(request).unwrap();
        serde_json::to_value(select_option(&request, answer).1).unwrap()["outcome"].clone()
    }

    #[test]
    fn the_answer_selects_the_narrowest_option_of_its_kind() {
        let both = json!([
            {"optionId":"always","name":"A","kind":"allow_always"},
            {"optionId":"once","name":"O","kind":"allow_once"},
            {"optionId":"no","name":"N","kind":"reject_once"},
        ]);
        let selected = |id: &str| json!({"outcome":"selected","optionId":id});
        let cancelled = json!({"outcome":"cancelled"});
        assert_eq!(select(both.clone(), PolicyAnswer::Allow), selected("once"));
        assert_eq!(select(both.clone(), PolicyAnswer::Deny), selected("no"));
        assert_eq!(select(both, PolicyAnswer::Cancelled), cancelled);
        assert_eq!(select(json!([]), PolicyAnswer::Allow), cancelled);
    }

    #[test]
    fn a_tool_of_the_plane_is_allowed_and_the_policy_decides_about_all_others() {
        use PermissionPolicy::{Allow, Ask, Deny};
        assert_eq!(decide(Deny, CheckedByPlane::Yes), Some(PolicyAnswer::Allow));
        assert_eq!(decide(Ask, CheckedByPlane::Yes), Some(PolicyAnswer::Allow));
        assert_eq!(decide(Deny, CheckedByPlane::No), Some(PolicyAnswer::Deny));
        assert_eq!(decide(Allow, CheckedByPlane::No), Some(PolicyAnswer::Allow));
        assert_eq!(decide(Ask, CheckedByPlane::No), None);
    }
}
