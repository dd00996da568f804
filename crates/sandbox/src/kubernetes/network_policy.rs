//! What pods may reach: where this server listens for them, and nothing else. Nothing reaches them.
//!
//! One policy for all pods of a home, made before the first of them and brought up to date when the address changes. The
//! cluster's network plugin keeps it; some keep none.

use std::net::SocketAddr;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::KubernetesDriverInner;
use crate::container::SCOPE_LABEL;
use crate::driver::SandboxError;

/// The owner of the policy's fields.
const FIELD_MANAGER: &str = "oubliette";

/// What is wrong where a pod reached the port that the policy closes, and what to do about it.
pub(super) const NOT_KEPT: &str = "this cluster does not keep network policies: a pod reached a port that its policy closes, so an agent could reach the network";
pub(super) const REMEDY: &str = "Install a network plugin that keeps NetworkPolicy, such as Calico or Cilium; or, where agents may reach \
                                 whatever pods reach, set [sandbox.kubernetes] network_policy = \"unchecked\".";

/// The policy's name, and the policy as it is applied.
fn policy(scope: &str, server: SocketAddr) -> (String, serde_json::Value) {
    let name = format!("oubliette-{scope}");
    let (address, port) = (server.ip().to_canonical(), server.port());
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let object = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": name, "labels": { SCOPE_LABEL: scope } },
        "spec": {
            "podSelector": { "matchLabels": { SCOPE_LABEL: scope } },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [{
                "to": [{ "ipBlock": { "cidr": format!("{address}/{bits}") } }],
                "ports": [{ "protocol": "TCP", "port": port }],
            }],
        },
    });
    (name, object)
}

impl KubernetesDriverInner {
    /// Makes the policy, or brings it up to date; returns what it says.
    pub(super) async fn ensure_network_policy(&self) -> Result<String, SandboxError> {
        let server = self.stage_address().await?;
        let client = self.cluster.client().await?;
        let policies: Api<NetworkPolicy> = Api::namespaced(client.clone(), self.cluster.namespace());
        let (name, object) = policy(&self.pods.scope, server);
        let how = PatchParams::apply(FIELD_MANAGER).force();
        policies
            .patch(&name, &how, &Patch::Apply(&object))
            .await
            .map_err(|error| self.cluster.failed("making the network policy", &error))?;
        Ok(format!("{name}: pods reach {server} and nothing else"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_reach_the_stage_address_and_nothing_else() {
        let (name, object) = policy("0123abcd", "10.1.2.3:7443".parse().unwrap());
        assert_eq!(name, "oubliette-0123abcd");
        let parsed: NetworkPolicy = serde_json::from_value(object).unwrap();
        let spec = parsed.spec.unwrap();
        let selector = spec.pod_selector.unwrap().match_labels.unwrap();
        assert_eq!(selector[SCOPE_LABEL], "0123abcd");
        assert_eq!(spec.policy_types.unwrap(), ["Ingress", "Egress"]);
        assert!(spec.ingress.unwrap_or_default().is_empty());
        let egress = spec.egress.unwrap();
        let peers = egress[0].to.as_ref().unwrap();
        assert_eq!((egress.len(), peers.len()), (1, 1));
        assert_eq!(peers[0].ip_block.as_ref().unwrap().cidr, "10.1.2.3/32");
        assert_eq!(egress[0].ports.as_ref().unwrap().len(), 1);
        let (_, six) = policy("x", "[fd00::1]:7443".parse().unwrap());
        assert_eq!(
            six["spec"]["egress"][0]["to"][0]["ipBlock"]["cidr"],
            "fd00::1/128"
        );
    }
}
