//! Answers an agent's permission requests by the policy in its definition. Whatever it allows, the agent stays
//! within its sandbox.

use agent_client_protocol::v1::schema::{
    PermissionOption, PermissionOptionKind, RequestPermissionOutcome, RequestPermissionRequest,
    RequestPermissionResponse, SelectedPermissionOutcome,
};
use oubliette_protocol::agent::PermissionPolicy;

/// Selects the option that fits the policy. The answer is `cancelled` when none fits or the turn is being
/// cancelled.
pub(crate) fn answer(
    request: &RequestPermissionRequest,
    policy: PermissionPolicy,
    cancelling: bool,
) -> RequestPermissionResponse {
    use PermissionOptionKind::{AllowAlways, AllowOnce, RejectAlways, RejectOnce};
    // The narrower option first: after "once" the agent asks again the next time.
    let wanted = match policy {
        PermissionPolicy::Allow => [AllowOnce, AllowAlways],
        PermissionPolicy::Deny => [RejectOnce, RejectAlways],
    };
    let find = |kind: &PermissionOptionKind| {
        request
            .options
            .iter()
            .find(|o: &&PermissionOption| o.kind == *kind)
    };
    let outcome = match wanted.iter().find_map(find) {
        Some(option) if !cancelling => {
            RequestPermissionOutcome::Selected(SelectedPermissionOutcome::new(option.option_id.clone()))
        }
        _ => RequestPermissionOutcome::Cancelled,
    };
    RequestPermissionResponse::new(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn ask(options: Value, policy: PermissionPolicy, cancelling: bool) -> Value {
        let request = json!({"sessionId":"s","toolCall":{"toolCallId":"c"},"options":options});
        let request = serde_json::from_value(request).unwrap();
        serde_json::to_value(answer(&request, policy, cancelling)).unwrap()["outcome"].clone()
    }

    #[test]
    fn the_policy_selects_an_option_unless_the_turn_is_cancelled() {
        let both = json!([
            {"optionId":"always","name":"A","kind":"allow_always"},
            {"optionId":"once","name":"O","kind":"allow_once"},
            {"optionId":"no","name":"N","kind":"reject_once"},
        ]);
        let selected = |id: &str| json!({"outcome":"selected","optionId":id});
        assert_eq!(
            ask(both.clone(), PermissionPolicy::Allow, false),
            selected("once")
        );
        assert_eq!(ask(both.clone(), PermissionPolicy::Deny, false), selected("no"));
        assert_eq!(
            ask(both, PermissionPolicy::Allow, true),
            json!({"outcome":"cancelled"})
        );
        assert_eq!(
            ask(json!([]), PermissionPolicy::Allow, false),
            json!({"outcome":"cancelled"})
        );
    }
}
