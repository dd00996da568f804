//! A connection being made: process or socket, handshake, tools, all within the time for it.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};
use indexmap::IndexMap;
use oubliette_protocol::{Error, catalog::Transport};
use oubliette_sandbox::{Exit, Handle};
use tokio::time::timeout;

use super::{
    UpstreamSpec, UpstreamTool,
    fault::Fault,
    handshake::{self, Lifecycle, Link, Service},
    http::Endpoint,
    limits, listing,
    stdio::{self, Process},
    tcp,
    traffic::{Ending, Traffic},
    ws,
};
use crate::Secrets;

/// What is under the MCP client.
pub(super) struct Base {
    pub(super) link: Option<Link>,
    pub(super) process: Option<Process>,
    pub(super) traffic: Arc<Traffic>,
    pub(super) secrets: Arc<Secrets>,
}

/// A server that is ready.
pub(super) struct Ready {
    pub(super) base: Base,
    pub(super) service: Service,
    pub(super) lifecycle: Lifecycle,
    pub(super) tools: Vec<UpstreamTool>,
}

/// Starts or connects to the server, makes the handshake and lists its tools, all within `startupMs`.
pub(super) async fn open(spec: &UpstreamSpec, known: Lifecycle) -> Result<Ready, Fault> {
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
    let opened = timeout(startup, Box::pin(base.open(spec, known, &mut step))).await;
    let fault = match opened {
        Ok(Ok((service, lifecycle, tools))) => {
            return Ok(Ready {
                base,
                service,
                lifecycle,
                tools,
            });
        }
        Ok(Err(fault)) => fault,
        Err(_) => {
            let (limit, step) = (spec.server.timeouts.startup_ms, step.as_str());
            Fault::new(format!("not ready within {limit} ms: still {step}"))
        }
    };
    Err(base.abandon(fault).await)
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
        // What ended the connection says more than how the client noticed. A process that ends at once may be
        // seen first by its input, which cannot be written any more: its exit is waited for a moment.
        let told = match (self.traffic.ended.is_set(), handle) {
            (true, _) => Some(lost.await),
            (false, Some(_)) => timeout(limits::EXIT, lost).await.ok(),
            (false, None) => None,
        };
        Err(told.map_or(fault, |reason| Fault::new(&*reason)))
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

    /// Closes what is under the client, for this reason.
    pub(super) async fn close(&self, reason: &str) {
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
pub(super) async fn lost(traffic: &Traffic, process: Option<&Handle>) -> Arc<str> {
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
            Ending::Closed => match timeout(limits::EXIT, process.wait()).await {
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
