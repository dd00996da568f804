//! Tool servers: MCP over stdio, ws, tcp and http, started, watched, called and stopped.
//!
//! A server that floods, hangs, lies, dies or never reads costs its own calls and nothing else.
//!
//! In the order a server lives:
//!
//! - this file: [`Upstream`], what the rest of the crate holds of a server.
//! - [`supervisor`]: its one task: start, watch, restart, stop; [`board`]: what everyone sees of it.
//! - [`connection`]: one connection: [`opening`] makes it, with the [`handshake`] of either lifecycle;
//!   [`calling`] calls tools on it.
//! - [`stdio`], [`ws`], [`tcp`], [`http`]: how a connection is made; [`lines`], [`tls`]: what they share.
//! - [`wire`]: a connection as the MCP client wants one; [`traffic`]: what passes over it, looked at, with
//!   [`envelope`] to tell what it is and [`unasked`] to count floods; [`straight`]: calls that go past the
//!   client.
//! - [`listing`]: the tools it has; [`stderr`]: what it said last; [`fault`]: why it is down.
//! - [`limits`]: how much is put up with; [`latch`]: a value set once.

mod board;
mod calling;
mod connection;
mod envelope;
mod fault;
mod handshake;
mod http;
mod latch;
mod limits;
mod lines;
mod listing;
mod opening;
mod stderr;
mod stdio;
mod straight;
mod supervisor;
mod tcp;
mod tls;
mod traffic;
mod unasked;
mod wire;
mod ws;

use std::{path::PathBuf, sync::Arc, time::Duration};

use oubliette_protocol::{
    Error, Object, Result, Slug,
    catalog::McpServer,
    tool::{CallResult, ServerRow},
};
use oubliette_sandbox::{Limits, Sandbox};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use listing::UpstreamTool;

use crate::{CallContext, CallThread, DebugSink, Environment, Trust, call::Given};
use board::{Board, Phase};
use connection::Connection;
use supervisor::{Order, Supervisor};

/// Everything a server needs.
#[derive(Clone)]
pub struct UpstreamSpec {
    /// Its definition.
    pub server: McpServer,
    /// The agent it is started for.
    pub agent: Slug,
    /// The session's workspace, on the host.
    pub workspace: PathBuf,
    /// Where a stdio server runs.
    pub sandbox: Arc<dyn Sandbox>,
    /// Where one with `isolation: "host"` does.
    pub host: Arc<dyn Sandbox>,
    /// What of the host it may have.
    pub trust: Arc<Trust>,
    /// How much of the machine it may use.
    pub limits: Limits,
    /// Where `${env:NAME}` is read from.
    pub env: Arc<dyn Environment>,
    /// Where debugger events go.
    pub debug: Arc<dyn DebugSink>,
    /// The proxy's socket on the host, for `network: "proxy"`.
    pub proxy_socket: Option<PathBuf>,
    /// Where it is listened to.
    pub thread: CallThread,
}

/// A tool server of one agent context. Dropping it stops the server; [`Upstream::stop`] also waits.
pub struct Upstream {
    board: Arc<Board>,
    orders: mpsc::Sender<Order>,
    /// How long a call waits for a server that is being started.
    patience: Duration,
    _held: DropGuard,
}

/// Holds up the start of a successor, until it is dropped.
pub(crate) struct Hold {
    _sender: oneshot::Sender<()>,
}

impl Upstream {
    /// Starts a server. Returns at once, with the first start under way.
    pub fn start(spec: UpstreamSpec) -> Arc<Self> {
        Self::start_with(spec, Arc::from([]), None)
    }

    /// Starts a server in the place of this one, as soon as the hold is dropped. Until it has listed its own
    /// tools it shows those of this one, and who calls them waits for it.
    pub(crate) fn succeed(&self, spec: UpstreamSpec) -> (Arc<Self>, Hold) {
        let (hold, place) = oneshot::channel();
        (
            Self::start_with(spec, self.tools(), Some(place)),
            Hold { _sender: hold },
        )
    }

    fn start_with(
        spec: UpstreamSpec,
        tools: Arc<[UpstreamTool]>,
        place: Option<oneshot::Receiver<()>>,
    ) -> Arc<Self> {
        let board = Arc::new(Board::new(
            spec.server.id.clone(),
            spec.server.transport.as_str(),
            spec.agent.clone(),
            spec.debug.clone(),
            tools,
        ));
        let timeouts = spec.server.timeouts;
        let (orders, receiver) = mpsc::channel(8);
        let abandoned = CancellationToken::new();
        let held = abandoned.clone().drop_guard();
        let thread = spec.thread.clone();
        let supervisor = Supervisor {
            spec,
            board: board.clone(),
            orders: receiver,
            abandoned,
        };
        thread.spawn(supervisor.run(place));
        let patience = Duration::from_millis(timeouts.request_ms.min(timeouts.startup_ms));
        Arc::new(Self {
            board,
            orders,
            patience,
            _held: held,
        })
    }

    /// Waits until the first start is over, one way or the other.
    pub async fn settled(&self) {
        // The board outlives this borrow, so the wait cannot fail.
        let _ = self.board.views().wait_for(|view| view.settled).await;
    }

    /// The tools it has, or had before it went down.
    pub fn tools(&self) -> Arc<[UpstreamTool]> {
        self.board.tools()
    }

    /// How it is doing.
    pub fn status(&self) -> ServerRow {
        self.board.row()
    }

    /// Whether it can be called now.
    pub fn is_up(&self) -> bool {
        self.board.connection().is_some()
    }

    /// A counter that grows whenever its tools or its light change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.board.changes()
    }

    /// Calls one of its tools. While it is being started or restarted the call waits for it; while it is
    /// down it fails at once, with the reason.
    pub async fn call(&self, tool: &str, arguments: Object, ctx: &CallContext) -> Result<CallResult> {
        self.ask(tool, &arguments, ctx).await.map(Given::read)
    }

    /// The same; the result may come unread.
    pub(crate) async fn ask(&self, tool: &str, arguments: &Object, ctx: &CallContext) -> Result<Given> {
        let connection = match self.board.connection() {
            Some(connection) => connection,
            None => Box::pin(self.arrival(ctx)).await?,
        };
        connection.call(tool, arguments, ctx).await
    }

    async fn arrival(&self, ctx: &CallContext) -> Result<Arc<Connection>> {
        let id = &self.board.id;
        let mut views = self.board.views();
        let over = views.wait_for(|view| match view.phase {
            Phase::Coming => false,
            // Lost, and not noticed yet by its supervisor.
            Phase::Up => self.board.connection().is_some(),
            Phase::Down | Phase::Stopped => true,
        });
        let view = tokio::select! {
            biased;
            view = over => view.map_err(Error::internal)?.clone(),
            () = ctx.cancel.cancelled() => return Err(Error::unavailable("the call was cancelled")),
            () = tokio::time::sleep(self.patience) => {
                return Err(Error::unavailable(format!("tool server {id} is still starting; try again later")));
            }
        };
        self.board.connection().ok_or_else(|| {
            let reason = view.error.as_deref().unwrap_or("no reason is known");
            Error::unavailable(format!("tool server {id} is down: {reason}"))
        })
    }

    /// Starts it again, whatever state it is in, and waits until it is ready.
    pub async fn restart(&self) -> Result<()> {
        let (asked, answer) = oneshot::channel();
        let stopped = || Error::unavailable(format!("tool server {} was stopped", self.board.id));
        self.orders
            .send(Order::Restart(asked))
            .await
            .map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Stops it: its stdin is closed, then it is asked to end, then its whole tree is killed. When this
    /// returns nothing of it is left.
    pub async fn stop(&self, reason: &str) {
        let (done, stopped) = oneshot::channel();
        if self.orders.send(Order::Stop(reason.into(), done)).await.is_ok() {
            let _ = stopped.await;
        }
    }
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
