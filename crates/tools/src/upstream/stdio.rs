//! MCP over the stdin and stdout of a server process started in its own sandbox.

use std::sync::Arc;

use oubliette_protocol::{Error, Result, agent, catalog::ServerIsolation, catalog::StdioTransport};
use oubliette_sandbox::{
    BindMount, PortForward, SandboxError, SandboxHandle, SandboxNetwork, SandboxSpec, SocketMount,
};

use super::{
    UpstreamSpec,
    cache::{CacheWatch, ServerCache},
    fault::{FaultRemedy, UpstreamFault},
    lines::{LineReader, LineWriter},
    startup::PreparedStart,
    traffic::TrafficFilter,
    wire::UpstreamWire,
};
use crate::{Secrets, StderrTail};

/// Path of the proxy's socket inside the sandbox.
const PROXY_SOCKET: &str = "/run/oubliette/proxy.sock";
/// Loopback port inside the sandbox that forwards to the proxy's socket.
const PROXY_PORT: u16 = 19_998;

/// The process of a stdio server.
pub(super) struct ServerProcess {
    /// Dropping it kills the whole process tree.
    pub(super) handle: SandboxHandle,
    /// Reads its stderr and keeps the tail.
    pub(super) stderr: StderrTail,
    /// Watches the size of its cache.
    pub(super) _cache_watch: Option<CacheWatch>,
}

/// Starts the process; returns a wire over its pipes, and its handle.
pub(super) async fn spawn(
    spec: &UpstreamSpec,
    stdio: &StdioTransport,
    prepared: &PreparedStart,
    secrets: &Secrets,
    traffic: Arc<TrafficFilter>,
) -> Result<(UpstreamWire, ServerProcess), UpstreamFault> {
    let process_spec = sandbox_spec(spec, stdio, prepared, secrets).map_err(UpstreamFault::refused)?;
    let sandbox = match stdio.isolation {
        ServerIsolation::Sandbox => &spec.setup.sandbox,
        ServerIsolation::Host => &spec.setup.host,
    };
    let group = spec.setup.group.as_ref();
    let cache = prepared
        .cache
        .as_ref()
        .map(|cache| (cache, cache.disk_watch(group)));
    let running = sandbox.spawn(process_spec).await.map_err(|error| UpstreamFault {
        remedy: match error {
            SandboxError::Invalid(_) | SandboxError::Program { .. } => FaultRemedy::EditDefinition,
            SandboxError::Unavailable { .. } | SandboxError::LimitExceeded(_) | SandboxError::Setup(_) => {
                FaultRemedy::Restart
            }
        },
        ..UpstreamFault::new(secrets.mask_text(&error.to_string()))
    })?;
    let cache_watch = cache.map(|(cache, watch)| cache.watch(watch, running.handle.clone(), traffic.clone()));
    let wire = UpstreamWire::new(
        LineReader::new(running.stdout, &traffic.buffers),
        LineWriter(running.stdin),
        traffic,
    );
    Ok((
        wire,
        ServerProcess {
            handle: running.handle,
            stderr: StderrTail::follow(running.stderr),
            _cache_watch: cache_watch,
        },
    ))
}

/// The sandbox of the server: the workspace, the environment of its definition, and what the host's trust
/// settings allow. It has no relay socket, no project environment and no key.
fn sandbox_spec(
    spec: &UpstreamSpec,
    stdio: &StdioTransport,
    prepared: &PreparedStart,
    secrets: &Secrets,
) -> Result<SandboxSpec> {
    let trust = &spec.setup.trust;
    if stdio.isolation == ServerIsolation::Host {
        trust.check_host_tool(&spec.server.id)?;
    }
    trust.check_network(stdio.network)?;
    let expand = |text: &String| trust.expand(text, &*spec.setup.env, secrets);

    let mut argv = match &prepared.launch {
        Some(launch) => launch.argv.clone(),
        None => vec![stdio.command.clone()],
    };
    argv.extend(stdio.args.iter().map(expand).collect::<Result<Vec<_>>>()?);
    let mut process_spec = SandboxSpec::new(spec.server.id.as_str(), argv);
    process_spec.workspace = Some(spec.setup.workspace.clone());
    process_spec.limits = spec.setup.limits.clone();
    process_spec.group = spec.setup.group.clone();
    process_spec.mounts = trust
        .check_read_only_all(&stdio.read_only)?
        .into_iter()
        .map(|path| BindMount::read_only(path.host, path.inside))
        .collect();
    if let Some(launch) = &prepared.launch {
        process_spec.mounts.extend(launch.mounts.iter().cloned());
        process_spec.env.extend(launch.env.iter().cloned());
    }
    if let Some(cache) = &prepared.cache {
        process_spec.mounts.push(cache.mount());
        process_spec.env.extend(ServerCache::variables());
    }
    match stdio.network {
        agent::NetworkAccess::None => process_spec.network = SandboxNetwork::None,
        agent::NetworkAccess::Host => process_spec.network = SandboxNetwork::Host,
        agent::NetworkAccess::Proxy => {
            let proxy = spec.setup.proxy.as_ref().ok_or_else(|| {
                Error::unavailable("it asks for network \"proxy\", and this session has no proxy")
            })?;
            let socket = proxy.socket_for(&spec.server.id, stdio.egress.as_deref())?;
            process_spec.sockets.push(SocketMount::new(socket, PROXY_SOCKET));
            process_spec.forwards.push(PortForward {
                port: PROXY_PORT,
                socket: PROXY_SOCKET.into(),
            });
            let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
            for name in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
                process_spec.env.push((name.into(), proxy.clone()));
            }
            for name in ["NO_PROXY", "no_proxy"] {
                process_spec
                    .env
                    .push((name.into(), "localhost,127.0.0.1,::1".into()));
            }
            // Node.js heeds the variables above only with this one.
            process_spec.env.push(("NODE_USE_ENV_PROXY".into(), "1".into()));
        }
    }
    for (name, value) in &stdio.env {
        process_spec.env.retain(|(other, _)| other != name);
        process_spec.env.push((name.clone(), expand(value)?));
    }
    Ok(process_spec)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, path::PathBuf};

    use oubliette_protocol::{
        CatalogId,
        catalog::{ToolDefinition, Transport},
        egress::HostPattern,
    };
    use oubliette_sandbox::HostDriver;
    use serde_json::{Value, json};

    use super::*;
    use crate::{DiscardDebug, ProxySockets, ServerSetup, TrustedResources};

    /// Names a socket after its server and list.
    struct NamedSockets;

    impl ProxySockets for NamedSockets {
        fn socket_for(&self, server: &CatalogId, egress: Option<&[HostPattern]>) -> Result<PathBuf> {
            Ok(format!(
                "/srv/{server}-{}.sock",
                egress.map_or("any".into(), |list| list.len().to_string())
            )
            .into())
        }
    }

    fn sandbox_spec_for(more: Value) -> Result<(SandboxSpec, Secrets)> {
        let mut definition = json!({"id":"srv","kind":"mcp","transport":"stdio","command":"npx"});
        definition
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let ToolDefinition::Mcp(server) = ToolDefinition::from_value(definition).unwrap() else {
            panic!()
        };
        let Transport::Stdio(stdio) = server.transport.clone() else {
            panic!()
        };
        let host = Arc::new(HostDriver::new("/nowhere"));
        let spec = UpstreamSpec {
            server,
            setup: ServerSetup {
                agent: "tester".parse().unwrap(),
                workspace: "/srv/w".into(),
                sandbox: host.clone(),
                host,
                trust: Arc::new(TrustedResources {
                    read_only: vec!["/usr".into()],
                    env: vec!["KEY".into()],
                    ..TrustedResources::default()
                }),
                limits: Default::default(),
                group: None,
                env: Arc::new(HashMap::from([("KEY".to_owned(), "k-123456".to_owned())])),
                debug: Arc::new(DiscardDebug),
                programs: None,
                caches: None,
                proxy: Some(Arc::new(NamedSockets)),
                thread: crate::CallThread::current_runtime(),
                buffers: Default::default(),
            },
        };
        let secrets = Secrets::new();
        sandbox_spec(&spec, &stdio, &PreparedStart::default(), &secrets)
            .map(|process_spec| (process_spec, secrets))
    }

    #[tokio::test]
    async fn a_server_gets_only_what_its_definition_names() {
        let more = json!({"args":["-y","--key=${env:KEY}"],"env":{"A":"b","K":"${env:KEY}"},"read_only":["/usr/bin"]});
        let (process_spec, secrets) = sandbox_spec_for(more).unwrap();
        assert_eq!(process_spec.argv, ["npx", "-y", "--key=k-123456"]);
        assert_eq!(
            process_spec.env,
            [("A".into(), "b".into()), ("K".into(), "k-123456".into())]
        );
        assert_eq!(process_spec.workspace.as_deref(), Some("/srv/w".as_ref()));
        assert_eq!(process_spec.cwd, std::path::Path::new("/workspace"));
        assert_eq!(
            process_spec.mounts,
            [BindMount::read_only("/usr/bin", "/usr/bin")]
        );
        assert_eq!(
            (process_spec.home, process_spec.sockets, process_spec.forwards),
            (None, vec![], vec![])
        );
        assert_eq!(process_spec.network, SandboxNetwork::None);
        assert!(!secrets.is_empty(), "what was read is hidden from then on");
    }

    #[tokio::test]
    async fn network_proxy_adds_socket_forward_and_environment() {
        let (process_spec, _) =
            sandbox_spec_for(json!({"network":"proxy","env":{"NO_PROXY":"mine"}})).unwrap();
        assert_eq!(process_spec.network, SandboxNetwork::None);
        assert_eq!(
            process_spec.sockets,
            [SocketMount::new("/srv/srv-any.sock", PROXY_SOCKET)]
        );
        assert_eq!(
            process_spec.forwards,
            [PortForward {
                port: PROXY_PORT,
                socket: PROXY_SOCKET.into()
            }]
        );
        let value = |name: &str| {
            process_spec
                .env
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, value)| value.as_str())
        };
        assert_eq!(value("HTTPS_PROXY"), Some("http://127.0.0.1:19998"));
        assert_eq!(value("NODE_USE_ENV_PROXY"), Some("1"));
        assert_eq!(value("NO_PROXY"), Some("mine"), "its own environment wins");
        let (listed, _) = sandbox_spec_for(json!({"network":"proxy","egress":["a.org"]})).unwrap();
        assert_eq!(
            listed.sockets,
            [SocketMount::new("/srv/srv-1.sock", PROXY_SOCKET)]
        );
    }
}
