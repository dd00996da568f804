//! `[sandbox.kubernetes]`: the cluster of the driver `kubernetes`.

use std::{
    net::SocketAddr,
    path::{Component, PathBuf},
};

use oubliette_protocol::{Error, Result, agent::check_image};
use oubliette_sandbox::NetworkPolicyUse;

use super::{field_error, raw::RawKubernetes};

/// What a pod is scheduled with by default.
const DEFAULT_CPU_REQUEST: f64 = 0.1;
const DEFAULT_MEMORY_REQUEST_MB: u64 = 128;

/// `[sandbox.kubernetes]`, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct KubernetesConfig {
    /// The namespace of pods.
    pub namespace: String,
    /// A kubeconfig file; none: found by itself.
    pub kubeconfig: Option<PathBuf>,
    /// The image of sessions that name none.
    pub image: Option<String>,
    /// The PersistentVolumeClaim of the shared volume.
    pub volume_claim: String,
    /// Where this server has it mounted.
    pub volume_path: PathBuf,
    /// Where this server listens for pods.
    pub stage_listen: SocketAddr,
    /// Where pods reach that.
    pub stage_address: String,
    /// The RuntimeClass of pods.
    pub runtime_class: Option<String>,
    /// What holds of the network policy.
    pub network_policy: NetworkPolicyUse,
    /// A warm pool, which `doctor` refuses.
    pub warm_pool: Option<String>,
    /// Processors that a pod is scheduled with, in cores.
    pub cpu_request: f64,
    /// Memory that a pod is scheduled with, in MiB.
    pub memory_request_mb: u64,
}

pub(super) fn resolve(raw: RawKubernetes) -> Result<KubernetesConfig> {
    let field = |name: &str| format!("sandbox.kubernetes.{name}");
    let missing = |name: &str, what: &str| {
        field_error(
            &field(name),
            format!("the driver \"kubernetes\" needs it: {what}"),
        )
    };
    let object_name = |name: &str, given: Option<String>| match given {
        Some(given) if !is_object_name(&given) => Err(field_error(
            &field(name),
            format!(
                "{given:?} is not the name of a Kubernetes object: small letters, digits, \"-\" and \".\""
            ),
        )),
        given => Ok(given),
    };
    let absolute = |name: &str, given: Option<PathBuf>| match given {
        Some(path) if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) => {
            Err(field_error(
                &field(name),
                format!("{} is not an absolute path", path.display()),
            ))
        }
        given => Ok(given),
    };
    if let Some(image) = &raw.image {
        check_image(&field("image"), image).map_err(|error| Error::invalid(error.to_string()))?;
    }
    let listen = raw.stage_listen.ok_or_else(|| {
        missing(
            "stage_listen",
            "where this server listens for pods, such as \"0.0.0.0:7443\"",
        )
    })?;
    let stage_listen = listen
        .parse::<SocketAddr>()
        .ok()
        .filter(|address| address.port() != 0);
    let address = raw.stage_address.ok_or_else(|| {
        missing(
            "stage_address",
            "where pods reach this server, such as \"10.0.0.5:7443\"",
        )
    })?;
    let cpu_request = raw.cpu_request.unwrap_or(DEFAULT_CPU_REQUEST);
    if !(cpu_request.is_finite() && (0.001..=4096.0).contains(&cpu_request)) {
        return Err(field_error(
            &field("cpu_request"),
            "must be between 0.001 and 4096",
        ));
    }
    let memory_request_mb = raw.memory_request.unwrap_or(DEFAULT_MEMORY_REQUEST_MB);
    if !(1..=1 << 20).contains(&memory_request_mb) {
        return Err(field_error(
            &field("memory_request"),
            "must be between 1 and 1048576",
        ));
    }
    Ok(KubernetesConfig {
        namespace: object_name("namespace", raw.namespace)?
            .ok_or_else(|| missing("namespace", "where pods are made"))?,
        kubeconfig: absolute("kubeconfig", raw.kubeconfig)?,
        image: raw.image,
        volume_claim: object_name("volume_claim", raw.volume_claim)?.ok_or_else(|| {
            missing(
                "volume_claim",
                "the volume that pods share with this server, a PersistentVolumeClaim",
            )
        })?,
        volume_path: absolute("volume_path", raw.volume_path)?
            .ok_or_else(|| missing("volume_path", "where this server has that volume mounted"))?,
        stage_listen: stage_listen.ok_or_else(|| {
            field_error(
                &field("stage_listen"),
                format!("{listen:?} is not an address and a port, such as \"0.0.0.0:7443\""),
            )
        })?,
        stage_address: match is_host_and_port(&address) {
            true => address,
            false => {
                return Err(field_error(
                    &field("stage_address"),
                    format!("{address:?} is not a host and a port, such as \"10.0.0.5:7443\""),
                ));
            }
        },
        runtime_class: object_name("runtime_class", raw.runtime_class)?,
        network_policy: match raw.network_policy.as_deref() {
            None | Some("required") => NetworkPolicyUse::Required,
            Some("unchecked") => NetworkPolicyUse::Unchecked,
            Some(other) => {
                return Err(field_error(
                    &field("network_policy"),
                    format!("{other:?}: use \"required\" or \"unchecked\""),
                ));
            }
        },
        warm_pool: object_name("warm_pool", raw.warm_pool)?,
        cpu_request,
        memory_request_mb,
    })
}

/// Whether a text is a name as most Kubernetes objects have it (RFC 1123 subdomain).
fn is_object_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= 253
        && name.bytes().all(|byte| plain(byte) || b"-.".contains(&byte))
        && name.bytes().next().is_some_and(plain)
        && name.bytes().next_back().is_some_and(plain)
}

fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte))
        }
    };
    // An address at which everybody listens is one that nobody can dial.
    let dialled = host != "0.0.0.0" && host != "[::]";
    is_host && dialled && port.parse::<u16>().is_ok_and(|port| port != 0)
}
