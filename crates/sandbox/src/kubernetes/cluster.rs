//! The cluster's API, with errors that say what to do.

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{ApiResource, DynamicObject};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Api, Client, Config, Error};
use tokio::sync::OnceCell;

use crate::driver::SandboxError;

/// How long the cluster may take to accept a connection, and to answer a request; longer than a watch lasts.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// A cluster and the namespace in it.
pub(super) struct Cluster {
    kubeconfig: Option<PathBuf>,
    namespace: String,
    client: OnceCell<(Client, String)>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("namespace", &self.namespace)
            .finish()
    }
}

impl Cluster {
    pub(super) fn new(kubeconfig: Option<PathBuf>, namespace: String) -> Self {
        Self {
            kubeconfig,
            namespace,
            client: OnceCell::new(),
        }
    }

    /// The namespace of pods.
    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// A client of the cluster. Nothing is asked yet.
    pub(super) async fn client(&self) -> Result<&Client, SandboxError> {
        Ok(&self.connected().await?.0)
    }

    /// The address of its API.
    pub(super) async fn address(&self) -> Result<&str, SandboxError> {
        Ok(&self.connected().await?.1)
    }

    async fn connected(&self) -> Result<&(Client, String), SandboxError> {
        let connect = async {
            let mut config = self.config().await.map_err(no_configuration)?;
            config.connect_timeout = Some(CONNECT_TIMEOUT);
            config.read_timeout = Some(ANSWER_TIMEOUT);
            let address = config.cluster_url.to_string();
            let client = Client::try_from(config).map_err(|error| no_configuration(error.to_string()))?;
            Ok::<_, SandboxError>((client, address))
        };
        self.client.get_or_try_init(|| connect).await
    }

    async fn config(&self) -> Result<Config, String> {
        if let Some(path) = &self.kubeconfig {
            let file = Kubeconfig::read_from(path).map_err(|error| error.to_string())?;
            let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
            return config.map_err(|error| error.to_string());
        }
        let outside = match Config::incluster() {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        let config = Config::from_kubeconfig(&KubeConfigOptions::default()).await;
        config.map_err(|error| format!("this server is in no pod ({outside}), and {error}"))
    }

    pub(super) fn pods(&self, client: &Client) -> Api<Pod> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    pub(super) fn events(&self, client: &Client) -> Api<Event> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    pub(super) fn dynamic(&self, client: &Client, kind: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(client.clone(), &self.namespace, kind)
    }

    /// What went wrong in a step, and what to do about it.
    pub(super) fn failed(&self, step: &str, error: &Error) -> SandboxError {
        match error {
            Error::Api(status) => self.refused(step, status),
            other => SandboxError::Unavailable {
                reason: format!(
                    "{step}: the Kubernetes API does not answer: {}",
                    with_causes(other)
                ),
                remedy:
                    "Check that the cluster runs and that its address in the kubeconfig is reached from here."
                        .into(),
            },
        }
    }

    fn refused(&self, step: &str, status: &Status) -> SandboxError {
        let said = status.message.trim();
        let namespace = &self.namespace;
        let unavailable = |reason: String, remedy: String| SandboxError::Unavailable { reason, remedy };
        match status.code {
            401 => unavailable(
                format!("{step}: the Kubernetes API does not know this server: {said}"),
                "Its token or certificate has expired or is of another cluster: renew the kubeconfig or the service account."
                    .into(),
            ),
            403 if said.contains("exceeded quota") => unavailable(
                format!("{step}: the quota of the namespace {namespace} is used up: {said}"),
                "End sessions, or raise the ResourceQuota; [sandbox.kubernetes] cpu_request and memory_request say what a pod \
                 takes of it."
                    .into(),
            ),
            403 if said.contains("PodSecurity") => unavailable(
                format!("{step}: the pod security of the namespace {namespace} refuses the pod: {said}"),
                "Pods of Oubliette keep the standard \"restricted\"; an admission rule of this cluster wants more or adds \
                 something that the standard forbids."
                    .into(),
            ),
            403 => unavailable(
                format!("{step}: this server may not do that: {said}"),
                missing_right(said, namespace),
            ),
            404 if said.contains("namespaces") => unavailable(
                format!("{step}: {said}"),
                format!("Make it, `kubectl create namespace {namespace}`, or name another in [sandbox.kubernetes] namespace."),
            ),
            _ => SandboxError::setup(step, said),
        }
    }
}

/// The right that the API says is missing, as a rule of a Role.
fn missing_right(said: &str, namespace: &str) -> String {
    let word_after = |marker: &str| {
        let rest = said.split_once(marker)?.1;
        rest.split([' ', '"']).find(|word| !word.is_empty())
    };
    match (word_after("cannot "), word_after("resource ")) {
        (Some(verb), Some(resource)) => format!(
            "Give the server's account the verb \"{verb}\" on \"{resource}\" in the namespace {namespace} (a Role and a \
             RoleBinding)."
        ),
        _ => format!(
            "An admission rule of the cluster refuses it, or a Role in the namespace {namespace} is missing a rule."
        ),
    }
}

fn no_configuration(why: impl std::fmt::Display) -> SandboxError {
    SandboxError::Unavailable {
        reason: format!("there is no way to a Kubernetes cluster: {why}"),
        remedy: "Run the server in the cluster, or name a kubeconfig file in [sandbox.kubernetes] kubeconfig or in KUBECONFIG."
            .into(),
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let said = next.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = next.source();
    }
    text
}

/// Whether the API says that there is no such thing.
pub(super) fn is_not_found(error: &Error) -> bool {
    matches!(error, Error::Api(status) if status.code == 404)
}

/// Whether the API answered at all.
pub(super) fn is_answer(error: &Error) -> bool {
    matches!(error, Error::Api(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: u16, message: &str) -> SandboxError {
        let cluster = Cluster::new(None, "team".into());
        let status = Status::failure(message, "").with_code(code);
        cluster.failed("creating the pod", &Error::Api(status.boxed()))
    }

    #[test]
    fn refusals_say_what_to_do() {
        let forbidden = refused(
            403,
            "pods is forbidden: User \"system:serviceaccount:team:oubliette\" cannot create resource \"pods\" in API group \"\" in \
             the namespace \"team\"",
        );
        let remedy = forbidden.remedy().unwrap();
        assert!(
            remedy.contains("\"create\" on \"pods\" in the namespace team"),
            "{remedy}"
        );
        let quota = refused(
            403,
            "pods \"x\" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2",
        );
        assert!(quota.to_string().contains("ResourceQuota"), "{quota}");
        let security = refused(
            403,
            "pods \"x\" is forbidden: violates PodSecurity \"restricted:latest\": runAsNonRoot",
        );
        assert!(security.to_string().contains("pod security"), "{security}");
        let namespace = refused(404, "namespaces \"team\" not found");
        assert!(
            namespace.to_string().contains("kubectl create namespace team"),
            "{namespace}"
        );
        assert!(refused(401, "Unauthorized").to_string().contains("expired"));
        let other = refused(
            422,
            "Pod \"x\" is invalid: spec.containers[0].image: Required value",
        );
        assert!(matches!(other, SandboxError::Setup(_)), "{other}");
    }
}
