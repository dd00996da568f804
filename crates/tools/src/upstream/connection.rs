//! One connection to a server, from the completed handshake to its close.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::CatalogId;
use oubliette_sandbox::StopTimeouts;
use parking_lot::Mutex;
use rmcp::{
    ClientHandler, RoleClient,
    model::{
        ClientRequest, DiscoverRequest, DiscoverRequestParams, ListToolsRequest, PingRequest,
        SubscriptionFilter,
    },
    service::{Peer, ServiceError},
};
use tokio::{task::JoinHandle, time::timeout};

use crate::registry::ToolInfo;

use super::{
    UpstreamSpec,
    direct_call::RequestMetadata,
    fault::UpstreamFault,
    handshake::{McpLifecycle, OublietteClientHandler, RunningMcpClient},
    latch::Latch,
    limits, listing,
    startup::{self, ConnectionResources, ReadyServer, wait_until_lost},
};

/// An established connection, through which tools are called.
pub(super) struct UpstreamConnection {
    pub(super) server: CatalogId,
    pub(super) peer: Peer<RoleClient>,
    client: Mutex<Option<RunningMcpClient>>,
    pub(super) resources: ConnectionResources,
    lifecycle: McpLifecycle,
    /// The `_meta` every call carries.
    pub(super) metadata: RequestMetadata,
    pub(super) request_timeout: Duration,
    /// Set, with the reason, when the connection is lost or closed.
    pub(super) closed: Latch<Arc<str>>,
    /// Whether the server answers `ping`; assumed until a ping goes unanswered while `tools/list` is answered.
    answers_ping: AtomicBool,
    /// Whether the server has answered a call.
    pub(super) has_answered: AtomicBool,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for UpstreamConnection {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl UpstreamConnection {
    /// Starts or connects to the server; returns when its tools are listed and can be called.
    pub(super) async fn open(
        spec: &UpstreamSpec,
        known: McpLifecycle,
    ) -> Result<(Arc<Self>, Vec<Arc<ToolInfo>>), UpstreamFault> {
        let ReadyServer {
            resources,
            client,
            lifecycle,
            tools,
        } = startup::connect_and_list(spec, known).await?;
        Ok((Self::new(spec, resources, client, lifecycle), tools))
    }

    fn new(
        spec: &UpstreamSpec,
        resources: ConnectionResources,
        client: RunningMcpClient,
        lifecycle: McpLifecycle,
    ) -> Arc<Self> {
        let peer = client.peer().clone();
        let closed = Latch::default();
        let (traffic, handle) = (
            resources.traffic.clone(),
            resources.process.as_ref().map(|process| process.handle.clone()),
        );
        let closed_setter = closed.clone();
        let mut tasks = vec![tokio::spawn(async move {
            closed_setter.set(wait_until_lost(&traffic, handle.as_ref()).await)
        })];
        let reports_changes = peer.peer_info().is_some_and(|info| {
            info.capabilities
                .tools
                .as_ref()
                .is_some_and(|tools| tools.list_changed == Some(true))
        });
        // In the `initialize` lifecycle servers report list changes unasked; in the newer one only to subscribers.
        if lifecycle == McpLifecycle::Discover && reports_changes {
            tasks.push(tokio::spawn(subscribe_list_changes(peer.clone())));
        }
        Arc::new(Self {
            server: spec.server.id.clone(),
            peer,
            client: Mutex::new(Some(client)),
            resources,
            lifecycle,
            metadata: RequestMetadata::new(lifecycle, OublietteClientHandler.get_info()),
            request_timeout: Duration::from_millis(spec.server.timeouts.request_ms),
            closed,
            answers_ping: AtomicBool::new(true),
            has_answered: AtomicBool::new(false),
            tasks,
        })
    }

    /// The lifecycle its handshake was made in.
    pub(super) fn lifecycle(&self) -> McpLifecycle {
        self.lifecycle
    }

    /// Whether it is neither lost nor closed.
    pub(super) fn is_alive(&self) -> bool {
        !self.closed.is_set()
    }

    /// Whether the server has answered a call.
    pub(super) fn has_answered_call(&self) -> bool {
        self.has_answered.load(Ordering::Relaxed)
    }

    /// Waits until the connection is lost or closed and returns the reason.
    pub(super) async fn wait_until_lost(&self) -> Arc<str> {
        self.closed.wait().await
    }

    /// Waits until the server reports that its tools have changed.
    pub(super) async fn wait_list_changed(&self) {
        self.resources.traffic.list_changed.notified().await;
    }

    /// Reads the server's tools, within the request timeout.
    pub(super) async fn list_tools(&self) -> Result<Vec<Arc<ToolInfo>>, UpstreamFault> {
        match timeout(self.request_timeout, listing::list_tools(&self.peer)).await {
            Ok(listed) => listed,
            Err(_) => Err(UpstreamFault::new("it did not answer tools/list in time")),
        }
    }

    /// Sends one health check (`server/discover`, `ping` or `tools/list`). Any answer passes, an error too.
    pub(super) async fn check_health(&self, within: Duration) -> Result<(), &'static str> {
        let discover = || ClientRequest::DiscoverRequest(DiscoverRequest::new(DiscoverRequestParams {}));
        let ping = || ClientRequest::PingRequest(PingRequest::default());
        let list = || ClientRequest::ListToolsRequest(ListToolsRequest::default());
        match (self.lifecycle, self.answers_ping.load(Ordering::Relaxed)) {
            (McpLifecycle::Discover, _) => self.expect_answer(discover(), within).await,
            (McpLifecycle::Initialize, false) => self.expect_answer(list(), within).await,
            (McpLifecycle::Initialize, true) => {
                if self.expect_answer(ping(), within).await.is_ok() {
                    return Ok(());
                }
                // Some servers do not answer methods they do not know: try one they must know before counting a
                // miss, and use that one from then on.
                self.expect_answer(list(), within).await?;
                self.answers_ping.store(false, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    async fn expect_answer(&self, request: ClientRequest, within: Duration) -> Result<(), &'static str> {
        match timeout(within, self.peer.send_request(request)).await {
            Ok(Ok(_) | Err(ServiceError::McpError(_))) => Ok(()),
            Ok(Err(_)) => Err("a health check could not be sent"),
            Err(_) => Err("a health check was not answered in time"),
        }
    }

    /// Closes the connection. A process has its stdin closed, then gets SIGTERM, then its whole tree SIGKILL.
    pub(super) async fn close(&self, reason: &str) {
        self.closed.set(reason.into());
        self.resources.close(reason).await;
        let process = async {
            if let Some(process) = &self.resources.process {
                let grace = StopTimeouts {
                    close: limits::STOP_STEP_TIMEOUT,
                    terminate: limits::STOP_STEP_TIMEOUT,
                };
                oubliette_sandbox::stop(None, &process.handle, grace).await;
            }
        };
        tokio::join!(process, self.close_client());
    }

    /// Closes the connection at once, killing the process tree.
    pub(super) async fn kill(&self, reason: &str) {
        self.closed.set(reason.into());
        if let Some(process) = &self.resources.process {
            process.handle.kill();
        }
        self.resources.close(reason).await;
        let process = async {
            if let Some(process) = &self.resources.process {
                process.handle.wait().await;
            }
        };
        tokio::join!(process, self.close_client());
    }

    async fn close_client(&self) {
        let client = self.client.lock().take();
        if let Some(mut client) = client {
            let _ = client.close_with_timeout(limits::CLOSE_TIMEOUT).await;
        }
    }

    /// The tail of the process's stderr, secrets masked.
    pub(super) fn stderr_tail(&self) -> Option<String> {
        self.resources
            .process
            .as_ref()?
            .stderr
            .masked_text(&self.resources.secrets)
    }

    /// `reason` with this server's secrets masked.
    pub(super) fn mask_secrets(&self, reason: &str) -> String {
        self.resources.secrets.mask_text(reason)
    }
}

/// Keeps a subscription to tool list changes open, as the `server/discover` lifecycle requires. The
/// notifications themselves are handled by [`super::traffic`].
async fn subscribe_list_changes(peer: Peer<RoleClient>) {
    const RETRY_INTERVAL: Duration = Duration::from_secs(5);
    loop {
        let filter = SubscriptionFilter::builder().tools_list_changed().build();
        match peer.listen(filter).await {
            Ok(mut subscription) => while let Ok(Some(_)) = subscription.next().await {},
            Err(ServiceError::McpError(error)) => {
                tracing::debug!(%error, "subscriptions/listen was refused; tool list changes will not be seen");
                return;
            }
            Err(_) => {}
        }
        if peer.is_transport_closed() {
            return;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}
