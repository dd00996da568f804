//! Follows the pods of this server with one watch for all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt as _};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// How long one watch lasts, in seconds: the API ends it then.
const WATCH_SECONDS: u32 = 240;
/// Time before the API is asked again when it did not answer.
const RETRY: Duration = Duration::from_millis(500);

/// A task that follows pods. Dropping it ends the task.
#[derive(Debug)]
pub(super) struct PodWatch {
    shared: Arc<WatchShared>,
    task: AbortHandle,
}

#[derive(Debug, Default)]
struct WatchShared {
    /// Only pods that somebody tracks.
    pods: Mutex<HashMap<String, PodState>>,
    changed: watch::Sender<u64>,
}

/// What is known of a pod.
#[derive(Debug, Clone, Default)]
pub(super) enum PodState {
    /// It was not seen yet.
    #[default]
    Unseen,
    /// As it was last seen.
    Seen(Box<Pod>),
    /// It was there and is not any more.
    Gone,
}

impl PodWatch {
    pub(super) fn start(api: Api<Pod>, selector: String) -> Self {
        let shared = Arc::new(WatchShared::default());
        let task = tokio::spawn(follow(shared.clone(), api, selector));
        Self {
            shared,
            task: task.abort_handle(),
        }
    }

    /// Follows a pod, which need not be there yet.
    pub(super) fn track(&self, name: &str) -> TrackedPod {
        self.shared.pods().insert(name.to_owned(), PodState::Unseen);
        TrackedPod {
            shared: self.shared.clone(),
            name: name.to_owned(),
        }
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A pod that is followed.
pub(super) struct TrackedPod {
    shared: Arc<WatchShared>,
    name: String,
}

impl TrackedPod {
    /// What is known of it now.
    pub(super) fn state(&self) -> PodState {
        self.shared.pods().get(&self.name).cloned().unwrap_or_default()
    }

    /// Waits until a look at the pod gives something.
    pub(super) async fn when<T>(&self, look: impl Fn(&PodState) -> Option<T>) -> T {
        let mut changed = self.shared.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if let Some(found) = look(&self.state()) {
                return found;
            }
            // The sender lives as long as `self`.
            let _ = changed.changed().await;
        }
    }
}

impl Drop for TrackedPod {
    fn drop(&mut self) {
        self.shared.pods().remove(&self.name);
    }
}

impl WatchShared {
    fn pods(&self) -> MutexGuard<'_, HashMap<String, PodState>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, name: &str, seen: Option<Pod>) {
        if let Some(known) = self.pods().get_mut(name) {
            known.update(seen);
        }
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Takes a list of all pods that there are.
    fn replace(&self, listed: Vec<Pod>) {
        let mut listed: HashMap<String, Pod> = listed.into_iter().map(|pod| (pod.name_any(), pod)).collect();
        for (name, known) in self.pods().iter_mut() {
            known.update(listed.remove(name));
        }
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

impl PodState {
    /// Takes what there is of the pod now. One that was gone stays so: another of the same name is not the same pod.
    fn update(&mut self, seen: Option<Pod>) {
        let next = match (&*self, seen) {
            (PodState::Gone, _) => return,
            (PodState::Unseen, None) => return,
            (PodState::Seen(known), Some(pod)) if known.uid() == pod.uid() => PodState::Seen(Box::new(pod)),
            (PodState::Unseen, Some(pod)) => PodState::Seen(Box::new(pod)),
            (PodState::Seen(_), _) => PodState::Gone,
        };
        *self = next;
    }
}

async fn follow(shared: Arc<WatchShared>, api: Api<Pod>, selector: String) {
    loop {
        match api.list(&ListParams::default().labels(&selector)).await {
            Ok(listed) => {
                let version = listed.metadata.resource_version.clone().unwrap_or_default();
                shared.replace(listed.items);
                follow_from(&shared, &api, &selector, version).await;
            }
            Err(error) => tracing::debug!(%error, "listing pods failed"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Follows changes from a version on, until that is too old or the API does not answer.
async fn follow_from(shared: &WatchShared, api: &Api<Pod>, selector: &str, mut version: String) {
    let how = WatchParams::default().labels(selector).timeout(WATCH_SECONDS);
    loop {
        let events = match api.watch(&how, &version).await {
            Ok(events) => events,
            Err(error) => {
                tracing::debug!(%error, "watching pods failed");
                return;
            }
        };
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(WatchEvent::Added(pod) | WatchEvent::Modified(pod)) => {
                    version = pod.resource_version().unwrap_or(version);
                    shared.set(&pod.name_any(), Some(pod));
                }
                Ok(WatchEvent::Deleted(pod)) => {
                    version = pod.resource_version().unwrap_or(version);
                    shared.set(&pod.name_any(), None);
                }
                Ok(WatchEvent::Bookmark(mark)) => version = mark.metadata.resource_version,
                Ok(WatchEvent::Error(status)) => {
                    tracing::debug!(status = status.message, "watching pods ended");
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "watching pods failed");
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_was_made_again_is_not_the_same() {
        let pod = |uid: &str| {
            let mut pod = Pod::default();
            (pod.metadata.name, pod.metadata.uid) = (Some("one".into()), Some(uid.into()));
            pod
        };
        let shared = WatchShared::default();
        shared.pods().insert("one".into(), PodState::Unseen);
        let state = || shared.pods()["one"].clone();
        shared.replace(Vec::new());
        assert!(matches!(state(), PodState::Unseen), "it may still come");
        shared.set("one", Some(pod("a")));
        shared.set("other", Some(pod("x")));
        shared.replace(vec![pod("a")]);
        assert!(matches!(state(), PodState::Seen(_)));
        shared.set("one", Some(pod("b")));
        assert!(matches!(state(), PodState::Gone));
        shared.replace(vec![pod("b")]);
        assert!(matches!(state(), PodState::Gone));
        assert_eq!(shared.pods().len(), 1, "only what is tracked");
    }
}
