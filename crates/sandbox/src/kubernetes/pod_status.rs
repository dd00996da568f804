//! What a pod's status says, in words for whoever waits for it.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Event, Pod, PodCondition};

use super::pod_watch::PodState;
use crate::driver::SandboxError;
use crate::handle::ExitCause;

/// Reasons for which a node waits with a container, of an image that it does not get.
const IMAGE_REASONS: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
];
/// Reasons for which a container is never started.
const CONTAINER_REASONS: [&str; 5] = [
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "StartError",
    "ContainerCannotRun",
];

fn container_status(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// Whether a node was found for the pod.
pub(super) fn is_scheduled(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
}

/// How the container ended, if it did.
pub(super) fn terminated(pod: &Pod) -> Option<&ContainerStateTerminated> {
    let state = container_status(pod)?.state.as_ref()?;
    state.terminated.as_ref()
}

/// Whether nothing runs in the pod any more.
pub(super) fn has_ended(state: &PodState) -> bool {
    match state {
        PodState::Unseen => false,
        PodState::Gone => true,
        PodState::Seen(pod) => {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            terminated(pod).is_some() || matches!(phase, Some("Succeeded" | "Failed"))
        }
    }
}

/// Why a pod will never run, if that is certain.
pub(super) fn start_failure(state: &PodState, image: &str) -> Option<StartProblem> {
    let pod = match state {
        PodState::Unseen => return None,
        PodState::Gone => {
            return Some(StartProblem::Error(SandboxError::Setup(
                "the pod was deleted while it was started".into(),
            )));
        }
        PodState::Seen(pod) => pod,
    };
    let waiting = container_status(pod)
        .and_then(|status| status.state.as_ref())
        .and_then(|state| state.waiting.as_ref());
    if let Some(waiting) = waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        let said = waiting.message.as_deref().unwrap_or(reason);
        if IMAGE_REASONS.contains(&reason) {
            return Some(StartProblem::Error(image_error(image, said)));
        }
        if CONTAINER_REASONS.contains(&reason) {
            return Some(StartProblem::Error(SandboxError::Setup(format!(
                "the node cannot start a container of the image {image}: {said}"
            ))));
        }
    }
    if let Some(cause) = cause_of_loss(pod) {
        return Some(StartProblem::Error(SandboxError::Unavailable {
            reason: format!("the pod did not start: {cause}{}", told(pod)),
            remedy: "Try again; if it happens again, look at the nodes: `kubectl describe nodes`.".into(),
        }));
    }
    has_ended(state).then_some(StartProblem::Ended)
}

/// Why a pod does not start.
pub(super) enum StartProblem {
    /// For this reason.
    Error(SandboxError),
    /// Its container ran and has ended.
    Ended,
}

fn image_error(image: &str, said: &str) -> SandboxError {
    let lower = said.to_ascii_lowercase();
    let remedy = if ["not found", "manifest unknown", "does not exist"]
        .iter()
        .any(|words| lower.contains(words))
    {
        "Is the name right, with its registry and tag? An image that is in no registry has to be on every node already."
    } else if ["denied", "unauthorized", "forbidden", "authentication"]
        .iter()
        .any(|word| lower.contains(word))
    {
        "The registry wants a login or has no such image: add an image pull secret to the namespace's service account \
         \"default\"."
    } else if lower.contains("invalid") {
        "Correct the name: sandbox.image of the agent or the project, or [sandbox.kubernetes] image."
    } else {
        "The node reaches no registry, or not this one: check its network and mirrors, or load the image on the nodes."
    };
    SandboxError::Unavailable {
        reason: format!("the image {image} could not be pulled: {}", said.trim()),
        remedy: remedy.into(),
    }
}

/// Why a pod has not started in time, as far as its status and events say.
pub(super) fn still_waiting(state: &PodState, events: &[Event], seconds: u64) -> SandboxError {
    let warning = newest_warning(events);
    let PodState::Seen(pod) = state else {
        return SandboxError::Unavailable {
            reason: format!(
                "no pod was made within {seconds} s{}",
                warning.map_or_else(String::new, |said| format!(": {said}"))
            ),
            remedy:
                "Look at the cluster's controllers: `oubliette doctor` says which objects are created here."
                    .into(),
        };
    };
    let unscheduled = condition(pod, "PodScheduled").filter(|condition| condition.status != "True");
    if let Some(unscheduled) = unscheduled {
        let said = unscheduled.message.as_deref().unwrap_or("no node was found");
        return SandboxError::Unavailable {
            reason: format!("no node takes the pod after {seconds} s: {said}"),
            remedy: "Add nodes or end sessions; or lower [sandbox.kubernetes] cpu_request and memory_request, which say what a \
                     pod needs to be scheduled."
                .into(),
        };
    }
    let reason = match warning {
        Some(said) => format!("the pod has not started after {seconds} s: {said}"),
        None => format!(
            "the pod's first process has not connected after {seconds} s{}",
            told(pod)
        ),
    };
    SandboxError::Unavailable {
        reason,
        remedy: "Do the nodes mount the volume of [sandbox.kubernetes] volume_claim, and do pods reach stage_address?".into(),
    }
}

fn newest_warning(events: &[Event]) -> Option<String> {
    let warnings = events
        .iter()
        .filter(|event| event.type_.as_deref() == Some("Warning"));
    let newest = warnings.max_by_key(|event| event.last_timestamp.clone())?;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    Some(format!("{}: {}", text(&newest.reason), text(&newest.message)))
}

/// What took a pod away, if it was not one who deleted it.
pub(super) fn cause_of_loss(pod: &Pod) -> Option<ExitCause> {
    let status = pod.status.as_ref()?;
    let reason = status.reason.as_deref().unwrap_or_default();
    let disrupted = condition(pod, "DisruptionTarget")
        .and_then(|condition| condition.reason.as_deref().map(str::to_owned));
    let disrupted = disrupted.as_deref().unwrap_or_default();
    match (reason, disrupted) {
        ("NodeLost", _) | (_, "DeletionByTaintManager" | "DeletionByPodGC") => Some(ExitCause::NodeLost),
        ("Evicted" | "Preempting" | "Shutdown" | "NodeShutdown" | "Terminated", _)
        | (_, "EvictionByEvictionAPI" | "PreemptionByScheduler" | "TerminationByKubelet") => {
            Some(ExitCause::Evicted)
        }
        ("UnexpectedAdmissionError" | "NodeAffinity" | "NodePorts", _) => Some(ExitCause::Evicted),
        (other, _) if other.starts_with("OutOf") => Some(ExitCause::Evicted),
        _ => None,
    }
}

/// The pod's own message, to be put behind others.
fn told(pod: &Pod) -> String {
    let message = pod.status.as_ref().and_then(|status| status.message.as_deref());
    message.map_or_else(String::new, |message| format!(" ({})", message.trim()))
}

/// Whether the container was ended for its memory.
pub(super) fn was_out_of_memory(pod: &Pod) -> bool {
    terminated(pod).is_some_and(|ended| ended.reason.as_deref() == Some("OOMKilled"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn seen(status: serde_json::Value) -> PodState {
        let pod = json!({ "metadata": {}, "spec": { "containers": [] }, "status": status });
        PodState::Seen(Box::new(serde_json::from_value(pod).unwrap()))
    }

    fn failure(status: serde_json::Value) -> Option<String> {
        match start_failure(&seen(status), "debian:12")? {
            StartProblem::Error(error) => Some(error.to_string()),
            StartProblem::Ended => Some("ended".into()),
        }
    }

    fn waiting(reason: &str, message: &str) -> serde_json::Value {
        json!({ "phase": "Pending", "containerStatuses": [{
            "name": "sandbox", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": reason, "message": message } },
        }] })
    }

    #[test]
    fn images_that_cannot_be_pulled_are_told_with_a_remedy() {
        let missing = failure(waiting("ErrImagePull", "debian:12: not found")).unwrap();
        assert!(
            missing.contains("debian:12") && missing.contains("on every node"),
            "{missing}"
        );
        let denied = failure(waiting("ImagePullBackOff", "pull access denied")).unwrap();
        assert!(denied.contains("image pull secret"), "{denied}");
        let invalid = failure(waiting("InvalidImageName", "couldn't parse: invalid reference")).unwrap();
        assert!(invalid.contains("sandbox.image"), "{invalid}");
        let unreachable = failure(waiting("ErrImagePull", "dial tcp: i/o timeout")).unwrap();
        assert!(unreachable.contains("mirrors"), "{unreachable}");
        assert_eq!(failure(waiting("ContainerCreating", "")), None);
    }

    #[test]
    fn a_pod_that_is_taken_away_says_so() {
        let evicted = json!({ "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory." });
        let told = failure(evicted.clone()).unwrap();
        assert!(
            told.contains("evicted") && told.contains("low on resource"),
            "{told}"
        );
        let PodState::Seen(pod) = seen(evicted) else {
            panic!()
        };
        assert_eq!(cause_of_loss(&pod), Some(ExitCause::Evicted));
        let lost = json!({ "phase": "Running", "conditions": [
            { "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager" }
        ] });
        let PodState::Seen(pod) = seen(lost) else { panic!() };
        assert_eq!(cause_of_loss(&pod), Some(ExitCause::NodeLost));
        assert!(matches!(
            start_failure(&PodState::Gone, "x"),
            Some(StartProblem::Error(_))
        ));
        assert_eq!(failure(json!({ "phase": "Succeeded" })).as_deref(), Some("ended"));
    }

    #[test]
    fn what_a_pod_waits_for_is_told() {
        let unschedulable = seen(json!({ "phase": "Pending", "conditions": [
            { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient cpu." }
        ] }));
        let told = still_waiting(&unschedulable, &[], 60).to_string();
        assert!(
            told.contains("Insufficient cpu") && told.contains("cpu_request"),
            "{told}"
        );
        let event: Event = serde_json::from_value(json!({
            "metadata": {}, "involvedObject": {}, "type": "Warning", "reason": "FailedMount",
            "message": "MountVolume.SetUp failed", "lastTimestamp": "2026-01-01T00:00:00Z",
        }))
        .unwrap();
        let told = still_waiting(&seen(json!({ "phase": "Pending" })), &[event], 60).to_string();
        assert!(
            told.contains("FailedMount") && told.contains("volume_claim"),
            "{told}"
        );
        let told = still_waiting(&PodState::Unseen, &[], 60).to_string();
        assert!(told.contains("no pod was made"), "{told}");
    }

    #[test]
    fn a_container_out_of_memory_is_recognised() {
        let ended = seen(json!({ "phase": "Failed", "containerStatuses": [{
            "name": "sandbox", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "terminated": { "exitCode": 137, "reason": "OOMKilled" } },
        }] }));
        assert!(has_ended(&ended));
        let PodState::Seen(pod) = ended else { panic!() };
        assert!(was_out_of_memory(&pod));
    }
}
