//! The object that is created for a sandbox: a Sandbox of agent-sandbox where that kind is installed, else the Pod itself.
//!
//! A Sandbox is given the whole pod as its template. Its controller makes the pod, with the same name and labels, so from
//! then on both are followed alike.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams, PropagationPolicy,
};
use kube::{Client, Error, ResourceExt as _};
use serde_json::{Value, json};

use super::cluster::{Cluster, is_not_found};
use crate::driver::SandboxError;

/// The group and version of the Sandbox kind.
pub(super) const SANDBOX_VERSION: &str = "agents.x-k8s.io/v1beta1";

/// What is created for each sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectKind {
    /// A Sandbox, from which a controller makes the pod.
    Sandbox,
    /// The pod itself.
    Pod,
}

/// The Sandbox kind, as the API names it.
pub(super) fn sandbox_resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("agents.x-k8s.io", "v1beta1", "Sandbox");
    ApiResource::from_gvk_with_plural(&kind, "sandboxes")
}

/// A Sandbox whose pod is this one.
fn sandbox_of(pod: &Pod) -> Result<DynamicObject, serde_json::Error> {
    let labels = &pod.metadata.labels;
    let mut object = DynamicObject::new(&pod.name_any(), &sandbox_resource());
    object.metadata.labels.clone_from(labels);
    object.data = json!({
        "spec": {
            "podTemplate": {
                "metadata": { "labels": labels },
                "spec": serde_json::to_value(&pod.spec)?,
            },
            // Nothing dials in.
            "service": false,
        }
    });
    Ok(object)
}

impl ObjectKind {
    /// Which kind this cluster has.
    pub(super) async fn find(client: &Client) -> Result<Self, Error> {
        match client.list_api_group_resources(SANDBOX_VERSION).await {
            Ok(found) if found.resources.iter().any(|kind| kind.name == "sandboxes") => Ok(Self::Sandbox),
            Ok(_) => Ok(Self::Pod),
            Err(error) if is_not_found(&error) => Ok(Self::Pod),
            Err(error) => Err(error),
        }
    }

    /// Creates the object.
    pub(super) async fn create(self, cluster: &Cluster, pod: &Pod) -> Result<(), SandboxError> {
        let client = cluster.client().await?;
        let how = PostParams::default();
        let created = match self {
            Self::Pod => cluster.pods(client).create(&how, pod).await.map(drop),
            Self::Sandbox => {
                let object =
                    sandbox_of(pod).map_err(|error| SandboxError::setup("the sandbox object", error))?;
                let api = cluster.dynamic(client, &sandbox_resource());
                api.create(&how, &object).await.map(drop)
            }
        };
        created.map_err(|error| cluster.failed("creating the pod", &error))
    }

    /// Deletes the object and its pod, running or not. It is no error if they are gone.
    pub(super) async fn delete(self, cluster: &Cluster, client: &Client, name: &str) -> Result<(), Error> {
        let missing_is_fine = |result: Result<(), Error>| match result {
            Err(error) if is_not_found(&error) => Ok(()),
            other => other,
        };
        if self == Self::Sandbox {
            // First: its controller would make a new pod.
            let how = DeleteParams {
                propagation_policy: Some(PropagationPolicy::Background),
                ..DeleteParams::default()
            };
            let api = cluster.dynamic(client, &sandbox_resource());
            missing_is_fine(api.delete(name, &how).await.map(drop))?;
        }
        let pods = cluster.pods(client);
        missing_is_fine(pods.delete(name, &DeleteParams::default()).await.map(drop))
    }

    /// Why the controller has made no pod of a Sandbox, if it says so.
    pub(super) async fn told(self, cluster: &Cluster, client: &Client, name: &str) -> Option<String> {
        if self == Self::Pod {
            return None;
        }
        let found = cluster.dynamic(client, &sandbox_resource()).get(name).await;
        not_ready(&found.ok()?.data)
    }

    /// The names and labels of the objects that a selector selects.
    pub(super) async fn list(
        self,
        cluster: &Cluster,
        client: &Client,
        selector: &str,
    ) -> Result<Vec<DynamicObject>, Error> {
        if self == Self::Pod {
            return Ok(Vec::new());
        }
        let api = cluster.dynamic(client, &sandbox_resource());
        Ok(api.list(&ListParams::default().labels(selector)).await?.items)
    }
}

/// What the condition `Ready` of a Sandbox says, if that is not `True`.
fn not_ready(data: &Value) -> Option<String> {
    let conditions = data["status"]["conditions"].as_array()?;
    let ready = conditions
        .iter()
        .find(|condition| condition["type"] == "Ready" && condition["status"] != "True")?;
    let text = |field: &str| ready[field].as_str().unwrap_or_default();
    Some(format!("{}: {}", text("reason"), text("message")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_object_has_the_whole_pod_and_no_service() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "one", "labels": { "oubliette.scope": "s" } },
            "spec": { "containers": [{ "name": "sandbox", "image": "x" }], "restartPolicy": "Never" },
        }))
        .unwrap();
        let object = serde_json::to_value(sandbox_of(&pod).unwrap()).unwrap();
        assert_eq!(object["apiVersion"], SANDBOX_VERSION);
        assert_eq!(object["kind"], "Sandbox");
        assert_eq!(object["metadata"]["name"], "one");
        let spec = &object["spec"];
        assert_eq!(
            spec["podTemplate"]["metadata"]["labels"],
            json!({ "oubliette.scope": "s" })
        );
        assert_eq!(spec["podTemplate"]["spec"]["restartPolicy"], "Never");
        assert_eq!(spec["service"], false);
    }

    #[test]
    fn a_controller_that_makes_no_pod_says_why() {
        let data = json!({ "status": { "conditions": [
            { "type": "Ready", "status": "False", "reason": "ReconcilerError", "message": "exceeded quota" }
        ] } });
        assert_eq!(
            not_ready(&data).as_deref(),
            Some("ReconcilerError: exceeded quota")
        );
        assert_eq!(not_ready(&json!({})), None);
    }
}
