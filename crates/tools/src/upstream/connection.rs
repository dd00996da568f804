//! One connection to a server, from its handshake to its end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_protocol::CatalogId;
use oubliette_sandbox::Grace;
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

use super::{
    UpstreamSpec, UpstreamTool,
    fault::Fault,
    handshake::{Lifecycle, Service, Us},
    latch::Latch,
    limits, listing,
    opening::{self, Base, Ready, lost},
    straight::Stamp,
};

/// A server that can be called.
pub(super) struct Connection {
    pub(super) server: CatalogId,
    pub(super) peer: Peer<RoleClient>,
    service: Mutex<Option<Service>>,
    pub(super) base: Base,
    lifecycle: Lifecycle,
    /// What goes with every call.
    pub(super) stamp: Stamp,
    pub(super) request_timeout: Duration,
    /// Set when it is lost or closed, with the reason.
    pub(super) gone: Latch<Arc<str>>,
    /// It answers pings, as far as is known.
    pings: AtomicBool,
    /// It has answered a call.
    pub(super) served: AtomicBool,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Connection {
    /// Starts or connects to the server; it can be called when this returns.
    pub(super) async fn open(
        spec: &UpstreamSpec,
        known: Lifecycle,
    ) -> Result<(Arc<Self>, Vec<UpstreamTool>), Fault> {
        let Ready {
            base,
            service,
            lifecycle,
            tools,
        } = opening::open(spec, known).await?;
        Ok((Self::new(spec, base, service, lifecycle), tools))
    }

    fn new(spec: &UpstreamSpec, base: Base, service: Service, lifecycle: Lifecycle) -> Arc<Self> {
        let peer = service.peer().clone();
        let gone = Latch::default();
        let (traffic, handle) = (
            base.traffic.clone(),
            base.process.as_ref().map(|process| process.handle.clone()),
        );
        let told = gone.clone();
        let mut tasks = vec![tokio::spawn(async move {
            told.set(lost(&traffic, handle.as_ref()).await)
        })];
        let changes = peer.peer_info().is_some_and(|info| {
            info.capabilities
                .tools
                .as_ref()
                .is_some_and(|tools| tools.list_changed == Some(true))
        });
        // Older servers tell of changes by themselves; newer ones are asked to.
        if lifecycle == Lifecycle::Discover && changes {
            tasks.push(tokio::spawn(listen(peer.clone())));
        }
        Arc::new(Self {
            server: spec.server.id.clone(),
            peer,
            service: Mutex::new(Some(service)),
            base,
            lifecycle,
            stamp: Stamp::new(lifecycle, Us.get_info()),
            request_timeout: Duration::from_millis(spec.server.timeouts.request_ms),
            gone,
            pings: AtomicBool::new(true),
            served: AtomicBool::new(false),
            tasks,
        })
    }

    /// Which lifecycle it speaks.
    pub(super) fn lifecycle(&self) -> Lifecycle {
        self.lifecycle
    }

    /// Whether it can still be called.
    pub(super) fn is_alive(&self) -> bool {
        !self.gone.is_set()
    }

    /// Whether it has answered a call.
    pub(super) fn has_served(&self) -> bool {
        self.served.load(Ordering::Relaxed)
    }

    /// Waits until it is lost, and says why.
    pub(super) async fn lost(&self) -> Arc<str> {
        self.gone.wait().await
    }

    /// Waits until the server says that its tools have changed.
    pub(super) async fn list_changed(&self) {
        self.base.traffic.list_changed.notified().await;
    }

    /// Asks for its tools.
    pub(super) async fn list(&self) -> Result<Vec<UpstreamTool>, Fault> {
        match timeout(self.request_timeout, listing::list(&self.peer)).await {
            Ok(listed) => listed,
            Err(_) => Err(Fault::new("it did not answer tools/list in time")),
        }
    }

    /// Asks for a sign of life. Any answer is one, a refusal too.
    pub(super) async fn check(&self, within: Duration) -> Result<(), &'static str> {
        let discover = || ClientRequest::DiscoverRequest(DiscoverRequest::new(DiscoverRequestParams {}));
        let ping = || ClientRequest::PingRequest(PingRequest::default());
        let list = || ClientRequest::ListToolsRequest(ListToolsRequest::default());
        match (self.lifecycle, self.pings.load(Ordering::Relaxed)) {
            (Lifecycle::Discover, _) => self.answers(discover(), within).await,
            (Lifecycle::Initialize, false) => self.answers(list(), within).await,
            (Lifecycle::Initialize, true) => {
                if self.answers(ping(), within).await.is_ok() {
                    return Ok(());
                }
                // It may be one that says nothing to what it does not know.
                self.answers(list(), within).await?;
                self.pings.store(false, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    async fn answers(&self, request: ClientRequest, within: Duration) -> Result<(), &'static str> {
        match timeout(within, self.peer.send_request(request)).await {
            Ok(Ok(_) | Err(ServiceError::McpError(_))) => Ok(()),
            Ok(Err(_)) => Err("a health check could not be sent"),
            Err(_) => Err("a health check was not answered in time"),
        }
    }

    /// Closes it: stdin, then SIGTERM, then SIGKILL of the whole tree; or the connection.
    pub(super) async fn close(&self, reason: &str) {
        self.gone.set(reason.into());
        self.base.close(reason).await;
        let process = async {
            if let Some(process) = &self.base.process {
                let grace = Grace {
                    close: limits::STOP_STEP,
                    terminate: limits::STOP_STEP,
                };
                oubliette_sandbox::stop(None, &process.handle, grace).await;
            }
        };
        tokio::join!(process, self.end_service());
    }

    /// Ends it at once, and says how its stderr ended.
    pub(super) async fn kill(&self, reason: &str) {
        self.gone.set(reason.into());
        if let Some(process) = &self.base.process {
            process.handle.kill();
        }
        self.base.close(reason).await;
        let process = async {
            if let Some(process) = &self.base.process {
                process.handle.wait().await;
            }
        };
        tokio::join!(process, self.end_service());
    }

    async fn end_service(&self) {
        let service = self.service.lock().take();
        if let Some(mut service) = service {
            let _ = service.close_with_timeout(limits::CLOSE).await;
        }
    }

    /// The end of its stderr.
    pub(super) fn stderr(&self) -> Option<String> {
        self.base.process.as_ref()?.stderr.tail(&self.base.secrets)
    }

    /// The reason it was lost, without secrets.
    pub(super) fn masked(&self, reason: &str) -> String {
        self.base.secrets.mask_text(reason)
    }
}

/// Keeps asking a server of the newer lifecycle to tell when its tools change. What it tells is seen by
/// [`super::traffic`]; the subscription only has to be there.
async fn listen(peer: Peer<RoleClient>) {
    const AGAIN: Duration = Duration::from_secs(5);
    loop {
        let filter = SubscriptionFilter::builder().tools_list_changed().build();
        match peer.listen(filter).await {
            Ok(mut subscription) => while let Ok(Some(_)) = subscription.next().await {},
            Err(ServiceError::McpError(error)) => {
                tracing::debug!(%error, "changes of the tool list are not told");
                return;
            }
            Err(_) => {}
        }
        if peer.is_transport_closed() {
            return;
        }
        tokio::time::sleep(AGAIN).await;
    }
}
