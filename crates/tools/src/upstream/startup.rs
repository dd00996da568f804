//! The start of a connection: process or socket, handshake and tool list, all within `startupMs`.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};
use indexmap::IndexMap;
use oubliette_programs::ProgramLaunch;
use oubliette_protocol::{
    Error, ErrorCode,
    catalog::{ServerIsolation, ServerStart, Transport},
};
use oubliette_sandbox::{SandboxExit, SandboxHandle};
use tokio::time::timeout;

use super::{
    UpstreamSpec,
    cache::ServerCache,
    fault::UpstreamFault,
    handshake::{self, ClientTransport, McpLifecycle, RunningMcpClient},
    http::HttpEndpoint,
    limits, listing,
    stdio::{self, ServerProcess},
    tcp,
    traffic::{ConnectionEnd, TrafficFilter},
    ws,
};
use crate::{Secrets, registry::ToolInfo};

/// What one connection owns beneath the MCP client: transport, process, traffic filter, secrets.
pub(super) struct ConnectionResources {
    pub(super) transport: Option<ClientTransport>,
    pub(super) process: Option<ServerProcess>,
    pub(super) traffic: Arc<TrafficFilter>,
    pub(super) secrets: Arc<Secrets>,
}

/// A connection whose handshake is made and whose tools are listed.
pub(super) struct ReadyServer {
    pub(super) resources: ConnectionResources,
    pub(super) client: RunningMcpClient,
    pub(super) lifecycle: McpLifecycle,
    pub(super) tools: Vec<Arc<ToolInfo>>,
}

/// Starts or connects to the server, makes the handshake (`known` lifecycle first) and lists its tools, all
/// within `startupMs`. On failure nothing of it keeps running.
pub(super) async fn connect_and_list(
    spec: &UpstreamSpec,
    known: McpLifecycle,
) -> Result<ReadyServer, UpstreamFault> {
    let secrets = Arc::new(Secrets::new());
    let traffic = TrafficFilter::new(
        spec.server.id.clone(),
        secrets.clone(),
        spec.setup.buffers.clone(),
    );
    let mut resources = ConnectionResources {
        transport: None,
        process: None,
        traffic,
        secrets,
    };
    let prepared = match prepare(spec).await {
        Ok(prepared) => prepared,
        Err(fault) => return Err(resources.abandon(fault).await),
    };
    let limit = spec.server.timeouts.startup_ms(prepared.start());
    let startup = Duration::from_millis(limit);
    let mut step = StartupStep::Connect;
    let opened = timeout(
        startup,
        Box::pin(resources.connect(spec, known, &prepared, &mut step)),
    )
    .await;
    let fault = match opened {
        Ok(Ok((client, lifecycle, tools))) => {
            prepared.set_started();
            return Ok(ReadyServer {
                resources,
                client,
                lifecycle,
                tools,
            });
        }
        Ok(Err(fault)) => fault,
        Err(_) => {
            let step = step.as_str();
            UpstreamFault::new(format!(
                "not ready within {limit} ms, the limit that timeouts.startupMs in its tool.json raises: still {step}"
            ))
        }
    };
    Err(resources.abandon(fault).await)
}

/// What a server needs before it is started, and what does not count towards `startupMs`.
#[derive(Default)]
pub(super) struct PreparedStart {
    /// How its program is run, if it is one.
    pub(super) launch: Option<ProgramLaunch>,
    /// Its cache, if it has one.
    pub(super) cache: Option<ServerCache>,
}

impl PreparedStart {
    fn start(&self) -> ServerStart {
        self.cache.as_ref().map_or(ServerStart::Later, ServerCache::start)
    }

    fn set_started(&self) {
        if let Some(cache) = &self.cache {
            cache.set_started();
        }
    }
}

/// Installs and checks the program of a stdio server, and makes its cache.
async fn prepare(spec: &UpstreamSpec) -> Result<PreparedStart, UpstreamFault> {
    let mut prepared = PreparedStart::default();
    let Transport::Stdio(stdio) = &spec.server.transport else {
        return Ok(prepared);
    };
    if let Some(program) = &stdio.program {
        let programs = spec.setup.programs.as_ref();
        let programs =
            programs.ok_or_else(|| UpstreamFault::new("it is a program, and none can be run here"))?;
        prepared.launch = Some(programs.launch(program).await.map_err(|error| match error.code {
            ErrorCode::Unavailable | ErrorCode::Timeout => UpstreamFault::new(error.message),
            _ => UpstreamFault::refused(error),
        })?);
    }
    if let (Some(caches), ServerIsolation::Sandbox) = (&spec.setup.caches, stdio.isolation) {
        let cache = ServerCache::new(caches, spec.server.id.as_str(), stdio);
        cache
            .prepare()
            .await
            .map_err(|error| UpstreamFault::new(format!("its cache cannot be made: {error}")))?;
        prepared.cache = Some(cache);
    }
    Ok(prepared)
}

/// The step a start is at, for the error text of a timeout.
#[derive(Clone, Copy)]
enum StartupStep {
    Connect,
    Handshake,
    ListTools,
}

impl StartupStep {
    fn as_str(self) -> &'static str {
        match self {
            StartupStep::Connect => "connecting",
            StartupStep::Handshake => "waiting for the answer to the handshake",
            StartupStep::ListTools => "waiting for the list of tools",
        }
    }
}

impl ConnectionResources {
    async fn connect(
        &mut self,
        spec: &UpstreamSpec,
        known: McpLifecycle,
        prepared: &PreparedStart,
        step: &mut StartupStep,
    ) -> Result<(RunningMcpClient, McpLifecycle, Vec<Arc<ToolInfo>>), UpstreamFault> {
        let traffic = self.traffic.clone();
        let transport = match &spec.server.transport {
            Transport::Stdio(stdio) => {
                let (wire, process) = stdio::spawn(spec, stdio, prepared, &self.secrets, traffic).await?;
                self.process = Some(process);
                ClientTransport::Wire(wire)
            }
            Transport::Ws { endpoint, headers } => {
                ClientTransport::Wire(ws::connect(endpoint, self.headers(spec, headers)?, traffic).await?)
            }
            Transport::Tcp { endpoint } => ClientTransport::Wire(tcp::connect(endpoint, traffic).await?),
            Transport::Http { endpoint, headers } => ClientTransport::Http(HttpEndpoint::new(
                endpoint,
                self.headers(spec, headers)?,
                traffic,
            )?),
        };
        let transport = self.transport.insert(transport);
        *step = StartupStep::Handshake;
        let ready = async {
            let (client, lifecycle) = handshake::perform_handshake(transport, known).await?;
            *step = StartupStep::ListTools;
            let tools = listing::list_tools(client.peer()).await?;
            Ok((client, lifecycle, tools))
        };
        let handle = self.process.as_ref().map(|process| &process.handle);
        let lost = wait_until_lost(&self.traffic, handle);
        tokio::pin!(lost);
        let fault: UpstreamFault = tokio::select! {
            biased;
            ready = ready => match ready {
                Ok(ready) => return Ok(ready),
                Err(fault) => fault,
            },
            reason = &mut lost => return Err(UpstreamFault::new(&*reason)),
        };
        // The reason the connection ended says more than the client's error. A process that exits at once may
        // first show as a failed write to its stdin, so its exit is waited for.
        let end_reason = match (self.traffic.ended.is_set(), handle) {
            (true, _) => Some(lost.await),
            (false, Some(_)) => timeout(limits::EXIT_TIMEOUT, lost).await.ok(),
            (false, None) => None,
        };
        Err(end_reason.map_or(fault, |reason| UpstreamFault::new(&*reason)))
    }

    fn headers(
        &self,
        spec: &UpstreamSpec,
        headers: &IndexMap<String, String>,
    ) -> Result<HeaderMap, UpstreamFault> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let value = spec
                .setup
                .trust
                .expand(value, &*spec.setup.env, &self.secrets)
                .map_err(UpstreamFault::refused)?;
            let wrong = |what: &str| {
                UpstreamFault::refused(Error::invalid(format!("the header {name:?} has a wrong {what}")))
            };
            let name: HeaderName = name.parse().map_err(|_| wrong("name"))?;
            let mut value = HeaderValue::from_str(&value).map_err(|_| wrong("value"))?;
            value.set_sensitive(true);
            map.append(name, value);
        }
        Ok(map)
    }

    /// Closes the transport; `reason` is what pending calls report.
    pub(super) async fn close(&self, reason: &str) {
        match &self.transport {
            Some(ClientTransport::Wire(wire)) => wire.close(reason).await,
            Some(ClientTransport::Http(_)) | None => {
                self.traffic.ended.set(ConnectionEnd::Fault(reason.into()))
            }
        }
    }

    /// Kills the process and closes the transport of a failed start; adds the tail of stderr to the fault.
    async fn abandon(self, fault: UpstreamFault) -> UpstreamFault {
        if let Some(process) = &self.process {
            process.handle.kill();
            // It is closed shortly after the process has exited.
            let _ = tokio::time::timeout(limits::EXIT_TIMEOUT, process.stderr.wait_closed()).await;
        }
        self.close(&fault.reason).await;
        let stderr = self
            .process
            .as_ref()
            .and_then(|process| process.stderr.masked_text(&self.secrets));
        UpstreamFault {
            reason: self.secrets.mask_text(&fault.reason).into(),
            stderr,
            remedy: fault.remedy,
        }
    }
}

/// Waits until a connection is lost and returns the reason. A process's exit and the end of its output come
/// together and either may be seen first; the exit code is preferred as the reason.
pub(super) async fn wait_until_lost(traffic: &TrafficFilter, process: Option<&SandboxHandle>) -> Arc<str> {
    let ended = |exit: SandboxExit| -> Arc<str> { format!("it ended: {exit}").into() };
    let Some(process) = process else {
        return match traffic.ended.wait().await {
            ConnectionEnd::Closed => "it closed the connection".into(),
            ConnectionEnd::Fault(reason) => reason,
        };
    };
    tokio::select! {
        biased;
        ending = traffic.ended.wait() => match ending {
            ConnectionEnd::Fault(reason) => reason,
            ConnectionEnd::Closed => match timeout(limits::EXIT_TIMEOUT, process.wait()).await {
                Ok(exit) => ended(exit),
                Err(_) => "it closed its output".into(),
            },
        },
        exit = process.wait() => {
            let _ = timeout(limits::DRAIN_TIMEOUT, traffic.ended.wait()).await;
            ended(exit)
        }
    }
}
