//! The sockets through which a session's sandboxes reach model providers, services and the HTTP proxy.
//!
//! The agent and each of its tool servers have a proxy socket of their own: what a connection may reach, and whose it is
//! in the debugger, is decided by the socket it came over.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use oubliette_egress::{EgressList, ProxyClient, ServiceClient};
use oubliette_os::{DescriptorWorker, PassedDescriptors};
use oubliette_protocol::{CatalogId, Error, Result, SessionId, agent::NetworkAccess, egress::HostPattern};
use oubliette_tools::ProxySockets;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    agent_plan::AgentPlan, egress_recorder::EgressRecorder, ports::SessionDeps, processes::SessionEnv,
    relay_socket::SessionSocket, usage::SessionModelSink,
};

/// The file name of the model forwarder's socket in the session's socket directory.
pub(crate) const MODEL_SOCKET_NAME: &str = "model.sock";
/// The file name of the agent's proxy socket.
pub(crate) const PROXY_SOCKET_NAME: &str = "proxy.sock";
/// The largest number of a tool server's socket: with it, the name is as long as the other sockets'.
const MAX_TOOL_SOCKET: usize = 99_999;

/// The sockets of one session's sandboxes, served until this is dropped.
pub(crate) struct EgressSockets {
    sockets: Arc<SandboxSockets>,
    services: Arc<ServiceClient>,
    /// The client of the agent's proxy socket, once that is bound. That happens only when something needs it, because
    /// without a mount namespace a socket cannot be hidden from the agent.
    agent_proxy: Option<Arc<ProxyClient>>,
    _stop_when_dropped: DropGuard,
}

impl EgressSockets {
    /// Binds and serves the sockets that the plan's agent needs.
    pub(crate) fn open(env: &SessionEnv, plan: &AgentPlan) -> Result<Self> {
        let stop = CancellationToken::new();
        let sockets = Arc::new(SandboxSockets {
            deps: env.deps.clone(),
            session: env.session.clone(),
            dir: env.socket_dir.clone(),
            descriptors: env.descriptors.clone(),
            recorder: EgressRecorder::new(env.debug.clone(), plan.agent().clone()),
            stop: stop.clone(),
            runtime: Handle::current(),
            tool_proxies: Mutex::default(),
        });
        let model = sockets.bind(MODEL_SOCKET_NAME)?.into_egress();
        env.meter.set_agent(plan.agent());
        let sink = Arc::new(SessionModelSink {
            meter: env.meter.clone(),
            debug: env.debug.clone(),
            agent: plan.agent().clone(),
        });
        let services = ServiceClient::new(
            env.deps.services.clone(),
            plan.upstreams.clone(),
            format!("sandbox.upstreams in agents/{}/agent.json", plan.agent()),
            sockets.recorder.sink(None),
        );
        let gateway = env.deps.gateway.clone();
        tokio::spawn(gateway.serve_with_services(model, sink, Some(services.clone()), stop.clone()));
        let mut open = Self {
            sockets,
            services,
            agent_proxy: None,
            _stop_when_dropped: stop.drop_guard(),
        };
        open.apply(plan)?;
        Ok(open)
    }

    /// Applies what the plan's agent may reach, at once, and binds its proxy socket if it needs one now.
    pub(crate) fn apply(&mut self, plan: &AgentPlan) -> Result<()> {
        self.services.set_names(plan.upstreams.clone());
        match &self.agent_proxy {
            Some(client) => client.set_lists(plan.egress.clone()),
            None if plan.network == NetworkAccess::Proxy => {
                let sink = self.sockets.recorder.sink(None);
                let client = ProxyClient::new(plan.egress.clone(), sink);
                self.sockets.serve_proxy(PROXY_SOCKET_NAME, client.clone())?;
                self.agent_proxy = Some(client);
            }
            None => {}
        }
        Ok(())
    }

    /// The proxy sockets of the session's tool servers.
    pub(crate) fn tool_proxies(&self) -> Arc<dyn ProxySockets> {
        self.sockets.clone()
    }
}

/// Binds sockets in a session's socket directory, and serves the proxy on them.
struct SandboxSockets {
    deps: Arc<SessionDeps>,
    session: SessionId,
    dir: PathBuf,
    descriptors: DescriptorWorker,
    recorder: Arc<EgressRecorder>,
    stop: CancellationToken,
    /// The main runtime: tool servers are started on the session's call thread, which must not serve connections.
    runtime: Handle,
    tool_proxies: Mutex<HashMap<CatalogId, ToolProxy>>,
}

/// A tool server's proxy socket.
struct ToolProxy {
    path: PathBuf,
    client: Arc<ProxyClient>,
}

impl SandboxSockets {
    fn bind(&self, name: &str) -> Result<SessionSocket> {
        let _runtime = self.runtime.enter();
        SessionSocket::bind(
            &self.deps,
            &self.session,
            self.dir.join(name),
            PassedDescriptors::Refused,
            &self.descriptors,
        )
    }

    fn serve_proxy(&self, name: &str, client: Arc<ProxyClient>) -> Result<()> {
        let listener = self.bind(name)?.into_egress();
        let proxy = self.deps.proxy.clone();
        self.runtime
            .spawn(proxy.serve_client(listener, self.stop.clone(), client));
        Ok(())
    }
}

impl ProxySockets for SandboxSockets {
    fn socket_for(&self, server: &CatalogId, egress: Option<&[HostPattern]>) -> Result<PathBuf> {
        let list = egress.map(|hosts| EgressList {
            hosts: hosts.to_vec(),
            setting: format!("egress in tools/{server}/tool.json"),
        });
        let lists = list.into_iter().collect();
        let mut open = self.tool_proxies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(socket) = open.get(server) {
            socket.client.set_lists(lists);
            return Ok(socket.path.clone());
        }
        if open.len() > MAX_TOOL_SOCKET {
            return Err(Error::limit_exceeded("this session has too many tool servers"));
        }
        // Not named after the server, because the path of a socket must be short.
        let name = format!("proxy{}", open.len());
        let client = ProxyClient::new(lists, self.recorder.sink(Some(server.clone())));
        self.serve_proxy(&name, client.clone())?;
        let path = self.dir.join(name);
        open.insert(
            server.clone(),
            ToolProxy {
                path: path.clone(),
                client,
            },
        );
        Ok(path)
    }
}
