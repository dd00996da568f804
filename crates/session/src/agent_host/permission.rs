//! An agent's own permission requests, answered by its policy: the sandbox bounds what they can mean.

use agent_client_protocol::v1::schema::{
    PermissionOption, PermissionOptionKind, RequestPermissionOutcome, RequestPermissionRequest,
    RequestPermissionResponse, SelectedPermissionOutcome,
};
use oubliette_protocol::agent::Permissions;

/// The answer. An agent that offers no fitting option, or whose turn is cancelled, is told `cancelled`.
pub(crate) fn answer(
    request: &RequestPermissionRequest,
    policy: Permissions,
    cancelling: bool,
) -> RequestPermissionResponse {
    use PermissionOptionKind::{AllowAlways, AllowOnce, RejectAlways, RejectOnce};
    // The narrower one first: what is allowed once is asked for again.
    let wanted = match policy {
        Permissions::Allow => [AllowOnce, AllowAlways],
        Permissions::Deny => [RejectOnce, RejectAlways],
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

    fn ask(options: Value, policy: Permissions, cancelling: bool) -> Value {
        let request = json!({"sessionId":"s","toolCall":{"toolCallId":"c"},"options":options});
        let request = serde_json::from_value(request).unwrap();
        serde_json::to_value(answer(&request, policy, cancelling)).unwrap()["outcome"].clone()
    }

    #[test]
    fn the_policy_answers_and_a_cancelled_turn_wins() {
        let both = json!([
            {"optionId":"always","name":"A","kind":"allow_always"},
            {"optionId":"once","name":"O","kind":"allow_once"},
            {"optionId":"no","name":"N","kind":"reject_once"},
        ]);
        let selected = |id: &str| json!({"outcome":"selected","optionId":id});
        assert_eq!(ask(both.clone(), Permissions::Allow, false), selected("once"));
        assert_eq!(ask(both.clone(), Permissions::Deny, false), selected("no"));
        assert_eq!(
            ask(both, Permissions::Allow, true),
            json!({"outcome":"cancelled"})
        );
        assert_eq!(
            ask(json!([]), Permissions::Allow, false),
            json!({"outcome":"cancelled"})
        );
    }
}
