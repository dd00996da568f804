//! MCP over the stdin and stdout of a process of ours, in a sandbox of its own.

use std::sync::Arc;

use oubliette_protocol::{Error, Result, agent, catalog::Isolation, catalog::Stdio};
use oubliette_sandbox::{Forward, Handle, Mount, Network, SandboxError, Socket, Spec};

use super::{
    UpstreamSpec,
    fault::{Cure, Fault},
    lines::{LineReader, LineWriter},
    stderr::Stderr,
    traffic::Traffic,
    wire::Wire,
};
use crate::Secrets;

/// Where the proxy is inside.
const PROXY_SOCKET: &str = "/run/oubliette/proxy.sock";
/// And on which port.
const PROXY_PORT: u16 = 19_998;

/// A server's process.
pub(super) struct Process {
    /// Its life; dropping it ends the whole tree.
    pub(super) handle: Handle,
    /// What it says.
    pub(super) stderr: Stderr,
}

/// Starts the process and gives its pipes.
pub(super) async fn spawn(
    spec: &UpstreamSpec,
    stdio: &Stdio,
    secrets: &Secrets,
    traffic: Arc<Traffic>,
) -> Result<(Wire, Process), Fault> {
    let order = order(spec, stdio, secrets).map_err(Fault::refused)?;
    let sandbox = match stdio.isolation {
        Isolation::Sandbox => &spec.sandbox,
        Isolation::Host => &spec.host,
    };
    let running = sandbox.spawn(order).await.map_err(|error| Fault {
        cure: match error {
            SandboxError::Invalid(_) | SandboxError::Program { .. } => Cure::Edit,
            SandboxError::Unavailable { .. } | SandboxError::Setup(_) => Cure::Restart,
        },
        ..Fault::new(secrets.mask_text(&error.to_string()))
    })?;
    let wire = Wire::new(
        LineReader::new(running.stdout),
        LineWriter(running.stdin),
        traffic,
    );
    Ok((
        wire,
        Process {
            handle: running.handle,
            stderr: Stderr::follow(running.stderr),
        },
    ))
}

/// What the server gets: the workspace, its own environment, and of the host what is trusted to it. No relay
/// socket, no project environment, no key.
fn order(spec: &UpstreamSpec, stdio: &Stdio, secrets: &Secrets) -> Result<Spec> {
    let trust = &spec.trust;
    if stdio.isolation == Isolation::Host {
        trust.check_host_tool(&spec.server.id)?;
    }
    trust.check_network(stdio.network)?;
    let expand = |text: &String| trust.expand(text, &*spec.env, secrets);

    let mut argv = vec![stdio.command.clone()];
    argv.extend(stdio.args.iter().map(expand).collect::<Result<Vec<_>>>()?);
    let mut order = Spec::new(spec.server.id.as_str(), argv);
    order.workspace = Some(spec.workspace.clone());
    order.limits = spec.limits.clone();
    order.mounts = trust
        .check_read_only_all(&stdio.read_only)?
        .into_iter()
        .map(|path| Mount::read_only(path.host, path.inside))
        .collect();
    match stdio.network {
        agent::Network::None => order.network = Network::None,
        agent::Network::Host => order.network = Network::Host,
        agent::Network::Proxy => {
            let socket = spec.proxy_socket.as_ref().ok_or_else(|| {
                Error::unavailable("it asks for network \"proxy\", and this session has no proxy")
            })?;
            order.sockets.push(Socket::new(socket, PROXY_SOCKET));
            order.forwards.push(Forward {
                port: PROXY_PORT,
                socket: PROXY_SOCKET.into(),
            });
            let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
            for name in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
                order.env.push((name.into(), proxy.clone()));
            }
            for name in ["NO_PROXY", "no_proxy"] {
                order.env.push((name.into(), "localhost,127.0.0.1,::1".into()));
            }
        }
    }
    for (name, value) in &stdio.env {
        order.env.retain(|(other, _)| other != name);
        order.env.push((name.clone(), expand(value)?));
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use oubliette_protocol::{Slug, catalog::ToolDefinition, catalog::Transport, debug::DebugBody};
    use oubliette_sandbox::Host;
    use serde_json::{Value, json};

    use super::*;
    use crate::{DebugSink, Trust};

    struct Nowhere;

    impl DebugSink for Nowhere {
        fn record(&self, _: Option<&Slug>, _: DebugBody) {}
    }

    fn order_of(more: Value) -> Result<(Spec, Secrets)> {
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
        let host = Arc::new(Host::new("/nowhere"));
        let spec = UpstreamSpec {
            server,
            agent: "tester".parse().unwrap(),
            workspace: "/srv/w".into(),
            sandbox: host.clone(),
            host,
            trust: Arc::new(Trust {
                read_only: vec!["/usr".into()],
                env: vec!["KEY".into()],
                ..Trust::default()
            }),
            limits: Default::default(),
            env: Arc::new(HashMap::from([("KEY".to_owned(), "k-123456".to_owned())])),
            debug: Arc::new(Nowhere),
            proxy_socket: Some("/srv/proxy.sock".into()),
            thread: crate::CallThread::here(),
        };
        let secrets = Secrets::new();
        order(&spec, &stdio, &secrets).map(|order| (order, secrets))
    }

    #[tokio::test]
    async fn a_server_gets_its_own_and_nothing_else() {
        let more = json!({"args":["-y","--key=${env:KEY}"],"env":{"A":"b","K":"${env:KEY}"},"read_only":["/usr/bin"]});
        let (order, secrets) = order_of(more).unwrap();
        assert_eq!(order.argv, ["npx", "-y", "--key=k-123456"]);
        assert_eq!(
            order.env,
            [("A".into(), "b".into()), ("K".into(), "k-123456".into())]
        );
        assert_eq!(order.workspace.as_deref(), Some("/srv/w".as_ref()));
        assert_eq!(order.cwd, std::path::Path::new("/workspace"));
        assert_eq!(order.mounts, [Mount::read_only("/usr/bin", "/usr/bin")]);
        assert_eq!(
            (order.home, order.sockets, order.forwards),
            (None, vec![], vec![])
        );
        assert_eq!(order.network, Network::None);
        assert!(!secrets.is_empty(), "what was read is hidden from then on");
    }

    #[tokio::test]
    async fn the_proxy_is_a_socket_a_port_and_its_usual_names() {
        let (order, _) = order_of(json!({"network":"proxy","env":{"NO_PROXY":"mine"}})).unwrap();
        assert_eq!(order.network, Network::None);
        assert_eq!(order.sockets, [Socket::new("/srv/proxy.sock", PROXY_SOCKET)]);
        assert_eq!(
            order.forwards,
            [Forward {
                port: PROXY_PORT,
                socket: PROXY_SOCKET.into()
            }]
        );
        let value = |name: &str| {
            order
                .env
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, value)| value.as_str())
        };
        assert_eq!(value("HTTPS_PROXY"), Some("http://127.0.0.1:19998"));
        assert_eq!(value("NO_PROXY"), Some("mine"), "its own environment wins");
    }
}
