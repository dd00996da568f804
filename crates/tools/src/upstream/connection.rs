//! One connection to a server, from its handshake to its end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use indexmap::IndexMap;
use oubliette_protocol::{CatalogId, Error, Object, Result, catalog::Transport, tool::CallResult};
use oubliette_sandbox::{Exit, Grace, Handle};
use parking_lot::Mutex;
use rmcp::{
    RoleClient,
    model::{
        CallToolRequest, CallToolRequestParams, ClientRequest, DiscoverRequest, DiscoverRequestParams,
        ListToolsRequest, PingRequest, ServerResult, SubscriptionFilter,
    },
    service::{Peer, PeerRequestOptions, RequestHandle, ServiceError},
};
use tokio::{task::JoinHandle, time::timeout};

use super::{
    UpstreamSpec, UpstreamTool,
    fault::{Fault, bounded, chain},
    handshake::{self, Lifecycle, Link, Service},
    http::{Endpoint, HttpError},
    latch::Latch,
    limits, listing,
    stdio::{self, Process},
    tcp,
    traffic::{Answer, Attached, Ending, ForHttp, Traffic, read_result},
    wire::NotSent,
    ws,
};
use crate::{CallContext, Secrets};

/// A server that can be called.
pub(super) struct Connection {
    server: CatalogId,
    peer: Peer<RoleClient>,
    service: Mutex<Option<Service>>,
    base: Base,
    lifecycle: Lifecycle,
    request_timeout: Duration,
    /// Set when it is lost or closed, with the reason.
    gone: Latch<Arc<str>>,
    /// It answers pings, as far as is known.
    pings: AtomicBool,
    /// It has answered a call.
    served: AtomicBool,
    tasks: Vec<JoinHandle<()>>,
}

/// What is under the MCP client.
struct Base {
    link: Option<Link>,
    process: Option<Process>,
    traffic: Arc<Traffic>,
    secrets: Arc<Secrets>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Connection {
    /// Starts or connects to the server, makes the handshake and lists its tools, all within `startupMs`.
    pub(super) async fn open(
        spec: &UpstreamSpec,
        lifecycle: Lifecycle,
    ) -> Result<(Arc<Self>, Vec<UpstreamTool>), Fault> {
        let secrets = Arc::new(Secrets::new());
        let traffic = Traffic::new(spec.server.id.clone(), secrets.clone());
        let mut base = Base {
            link: None,
            process: None,
            traffic,
            secrets,
        };
        let startup = Duration::from_millis(spec.server.timeouts.startup_ms);
        let mut step = Step::Connect;
        let opened = timeout(startup, Box::pin(base.open(spec, lifecycle, &mut step))).await;
        let fault = match opened {
            Ok(Ok((service, lifecycle, tools))) => {
                return Ok((Self::new(spec, base, service, lifecycle), tools));
            }
            Ok(Err(fault)) => fault,
            Err(_) => {
                let (limit, step) = (spec.server.timeouts.startup_ms, step.as_str());
                Fault::new(format!("not ready within {limit} ms: still {step}"))
            }
        };
        Err(base.abandon(fault).await)
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

    /// Calls a tool. One that is lost on the way fails at once and is never repeated: nobody knows what it
    /// did.
    pub(super) async fn call(&self, tool: &str, arguments: Object, ctx: &CallContext) -> Result<CallResult> {
        let answer = Answer::default();
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let mut request = CallToolRequest::new(params);
        let progress = ctx.progress.clone();
        request.extensions.insert(Attached {
            answer: answer.clone(),
            progress,
            for_http: ForHttp::Hidden,
        });
        let deadline = tokio::time::sleep(self.request_timeout);
        tokio::pin!(deadline);

        let sending = self.peer.send_cancellable_request(
            ClientRequest::CallToolRequest(request),
            PeerRequestOptions::no_options(),
        );
        let handle = tokio::select! {
            biased;
            sent = sending => sent.map_err(|error| self.failed(error))?,
            () = ctx.cancel.cancelled() => return Err(self.cancelled()),
            () = &mut deadline => return Err(self.late()),
        };
        let mut open = OpenCall(Some(handle));
        let Some(handle) = &mut open.0 else {
            return Err(self.unknown("it is closed"));
        };
        let response = tokio::select! {
            biased;
            response = &mut handle.rx => response,
            reason = self.gone.wait() => {
                // Its last answer may be on the way.
                match timeout(limits::LAST_WORDS / 2, &mut handle.rx).await {
                    Ok(Ok(response)) if !matches!(response, Err(ServiceError::TransportClosed)) => Ok(response),
                    _ => {
                        open.0 = None;
                        return Err(self.unknown(&reason));
                    }
                }
            }
            // Dropping the open call tells the server.
            () = ctx.cancel.cancelled() => return Err(self.cancelled()),
            () = &mut deadline => return Err(self.late()),
        };
        open.0 = None;
        let result = match response {
            Ok(Ok(ServerResult::EmptyResult(_))) => answer.lock().take(),
            // An answer that came another way, on a resumed stream for one.
            Ok(Ok(other)) => serde_json::to_vec(&other).ok().map(Bytes::from),
            Ok(Err(ServiceError::TransportClosed)) | Err(_) => {
                // Why is known in a moment, unless it is this one answer that was broken off.
                let reason = timeout(limits::LAST_WORDS, self.gone.wait()).await;
                return Err(self.unknown(reason.as_deref().unwrap_or("it broke off its answer")));
            }
            Ok(Err(error)) => return Err(self.failed(error)),
        };
        self.served.store(true, Ordering::Relaxed);
        let Some(result) = result else {
            return Ok(CallResult::default());
        };
        read_result(&result)
            .map_err(|why| Error::tool_error(format!("tool server {}: {}", self.server, bounded(&why))))
    }

    fn late(&self) -> Error {
        let limit = self.request_timeout.as_millis();
        Error::timeout(format!(
            "tool server {} did not answer within {limit} ms; it was told to stop",
            self.server
        ))
    }

    fn cancelled(&self) -> Error {
        Error::unavailable(format!(
            "the call was cancelled; tool server {} was told to stop",
            self.server
        ))
    }

    fn unknown(&self, reason: &str) -> Error {
        Error::unavailable(format!(
            "tool server {} was lost during the call ({reason}): outcome unknown; the call was not repeated",
            self.server
        ))
    }

    fn unsent(&self, reason: &str) -> Error {
        Error::unavailable(format!(
            "tool server {} did not get the call: {reason}",
            self.server
        ))
    }

    fn failed(&self, error: ServiceError) -> Error {
        let text =
            |error: &(dyn std::error::Error + 'static)| self.base.secrets.mask_text(bounded(&chain(error)));
        match error {
            ServiceError::McpError(error) => {
                self.served.store(true, Ordering::Relaxed);
                Error::tool_error(self.base.secrets.mask_text(bounded(&error.message)))
            }
            ServiceError::TransportSend(error) => {
                let cause = &*error.error;
                match (cause.downcast_ref::<NotSent>(), cause.downcast_ref::<HttpError>()) {
                    (Some(NotSent::Refused(why)), _) => self.unsent(why),
                    (Some(NotSent::Broken(why)), _) => self.unknown(why),
                    (_, Some(HttpError::Client(cause))) if cause.is_connect() => self.unsent(&text(cause)),
                    (_, Some(HttpError::Client(cause))) => self.unknown(&text(cause)),
                    (_, Some(cause)) => {
                        Error::unavailable(format!("tool server {}: {}", self.server, text(cause)))
                    }
                    (None, None) => self.unknown(&text(cause)),
                }
            }
            other => self.unknown(&text(&other)),
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

/// A call that was sent and not answered. Dropped, it tells the server that nobody waits any more.
struct OpenCall(Option<RequestHandle<RoleClient>>);

impl Drop for OpenCall {
    fn drop(&mut self) {
        if let Some(handle) = self.0.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = timeout(
                    limits::CLOSE,
                    handle.cancel(Some("nobody waits for it any more".into())),
                )
                .await;
            });
        }
    }
}

/// What a start is busy with.
#[derive(Clone, Copy)]
enum Step {
    Connect,
    Greet,
    List,
}

impl Step {
    fn as_str(self) -> &'static str {
        match self {
            Step::Connect => "connecting",
            Step::Greet => "waiting for the answer to the handshake",
            Step::List => "waiting for the list of tools",
        }
    }
}

impl Base {
    async fn open(
        &mut self,
        spec: &UpstreamSpec,
        known: Lifecycle,
        step: &mut Step,
    ) -> Result<(Service, Lifecycle, Vec<UpstreamTool>), Fault> {
        let traffic = self.traffic.clone();
        let link = match &spec.server.transport {
            Transport::Stdio(stdio) => {
                let (wire, process) = stdio::spawn(spec, stdio, &self.secrets, traffic).await?;
                self.process = Some(process);
                Link::Wire(wire)
            }
            Transport::Ws { endpoint, headers } => {
                Link::Wire(ws::connect(endpoint, self.headers(spec, headers)?, traffic).await?)
            }
            Transport::Tcp { endpoint } => Link::Wire(tcp::connect(endpoint, traffic).await?),
            Transport::Http { endpoint, headers } => {
                Link::Http(Endpoint::new(endpoint, self.headers(spec, headers)?, traffic)?)
            }
        };
        let link = self.link.insert(link);
        *step = Step::Greet;
        let ready = async {
            let (service, lifecycle) = handshake::greet(link, known).await?;
            *step = Step::List;
            let tools = listing::list(service.peer()).await?;
            Ok((service, lifecycle, tools))
        };
        let handle = self.process.as_ref().map(|process| &process.handle);
        let lost = lost(&self.traffic, handle);
        tokio::pin!(lost);
        let fault: Fault = tokio::select! {
            biased;
            ready = ready => match ready {
                Ok(ready) => return Ok(ready),
                Err(fault) => fault,
            },
            reason = &mut lost => return Err(Fault::new(&*reason)),
        };
        // What ended the connection says more than how the client noticed.
        match self.traffic.ended.is_set() {
            true => Err(Fault::new(&*lost.await)),
            false => Err(fault),
        }
    }

    fn headers(&self, spec: &UpstreamSpec, headers: &IndexMap<String, String>) -> Result<HeaderMap, Fault> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let value = spec
                .trust
                .expand(value, &*spec.env, &self.secrets)
                .map_err(Fault::refused)?;
            let wrong = |what: &str| {
                Fault::refused(Error::invalid(format!("the header {name:?} has a wrong {what}")))
            };
            let name: HeaderName = name.parse().map_err(|_| wrong("name"))?;
            let mut value = HeaderValue::from_str(&value).map_err(|_| wrong("value"))?;
            value.set_sensitive(true);
            map.append(name, value);
        }
        Ok(map)
    }

    async fn close(&self, reason: &str) {
        match &self.link {
            Some(Link::Wire(wire)) => wire.close(reason).await,
            Some(Link::Http(_)) | None => self.traffic.ended.set(Ending::Fault(reason.into())),
        }
    }

    /// Gives up a start: nothing of it stays, and the fault tells what stderr said.
    async fn abandon(mut self, fault: Fault) -> Fault {
        if let Some(process) = &mut self.process {
            process.handle.kill();
            process.stderr.finish().await;
        }
        self.close(&fault.reason).await;
        let stderr = self
            .process
            .as_ref()
            .and_then(|process| process.stderr.tail(&self.secrets));
        Fault {
            reason: self.secrets.mask_text(&fault.reason).into(),
            stderr,
            cure: fault.cure,
        }
    }
}

/// Waits until a connection is lost. The end of a process and the end of its output come together, and
/// either may be seen first; the exit code is the better reason.
async fn lost(traffic: &Traffic, process: Option<&Handle>) -> Arc<str> {
    let ended = |exit: Exit| -> Arc<str> { format!("it ended: {exit}").into() };
    let Some(process) = process else {
        return match traffic.ended.wait().await {
            Ending::Closed => "it closed the connection".into(),
            Ending::Fault(reason) => reason,
        };
    };
    tokio::select! {
        biased;
        ending = traffic.ended.wait() => match ending {
            Ending::Fault(reason) => reason,
            Ending::Closed => match timeout(limits::LAST_WORDS, process.wait()).await {
                Ok(exit) => ended(exit),
                Err(_) => "it closed its output".into(),
            },
        },
        exit = process.wait() => {
            let _ = timeout(limits::LAST_WORDS, traffic.ended.wait()).await;
            ended(exit)
        }
    }
}

/// Keeps asking a server of the newer lifecycle to tell when its tools change. What it tells is seen by
/// [`Traffic`]; the subscription only has to be there.
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
