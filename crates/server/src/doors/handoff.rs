//! Stdin and stdout that agents' clients hand off: the server reads and writes them, answers ordinary tool calls
//! itself and forwards the rest to the client. Calls pass the same gate as those over a relay socket.

use std::{
    convert::Infallible,
    sync::{Arc, Weak},
};

use oubliette_handoff::{handshake, interceptor};
use oubliette_os::UntrustedSocket;
use oubliette_protocol::{Error, SessionId, tool::ToolAddress};
use oubliette_relay::ProgressCallback;
use oubliette_tools::{CallContext, CallOrigin, RequestedTool, ToolPlane};
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::{
    connections::{ConnectionTable, TooManyConnections},
    relay,
};
use crate::app::App;

/// The open hand-offs.
pub(crate) struct HandoffConnections {
    app: Weak<App>,
    open: ConnectionTable<CancellationToken>,
}

impl HandoffConnections {
    /// For a server that is still being constructed.
    pub(crate) fn new(app: Weak<App>) -> Self {
        Self {
            app,
            open: ConnectionTable::default(),
        }
    }

    /// Serves a new connection to a session's hand-off socket. Closing it is a refusal: the client then keeps its
    /// streams and uses the relay socket.
    pub(crate) fn accept(&self, session: SessionId, socket: UntrustedSocket) {
        let token = || Ok::<_, Infallible>(CancellationToken::new());
        let stop = match self.open.add(&session, token) {
            Ok(Ok(stop)) => stop,
            Err(TooManyConnections) => {
                tracing::warn!(%session, "hand-off refused: the session has too many");
                return;
            }
        };
        let (app, open) = (self.app.clone(), self.open.clone());
        let entry = HandoffEntry { session, stop, open };
        tokio::spawn(async move {
            let session = entry.session.clone();
            if let Err(error) = spawn_interceptor(app, entry, socket).await {
                tracing::debug!(%session, %error, "hand-off refused");
            }
        });
    }

    /// Ends every hand-off of a session; their clients end too.
    pub(crate) fn close(&self, session: &SessionId) {
        self.open.close_all(session);
    }
}

/// A hand-off's entry in the table, removed when dropped.
struct HandoffEntry {
    session: SessionId,
    stop: CancellationToken,
    open: ConnectionTable<CancellationToken>,
}

impl Drop for HandoffEntry {
    fn drop(&mut self) {
        // Marks the entry as closed.
        self.stop.cancel();
        self.open.remove_closed(&self.session);
    }
}

/// Runs the handshake and the interceptor on the thread of the session's calls.
async fn spawn_interceptor(
    app: Weak<App>,
    entry: HandoffEntry,
    socket: UntrustedSocket,
) -> Result<(), Error> {
    let server = || {
        app.upgrade()
            .ok_or_else(|| Error::unavailable("the server is stopping"))
    };
    let plane = server()?.sessions.plane(&entry.session).await?;
    let thread = plane.thread().clone();
    let buffers = plane.buffers().clone();
    let tools = SessionLocalTools {
        app,
        plane,
        session: entry.session.clone(),
        main_runtime: Handle::current(),
    };
    thread.spawn(async move {
        let stop = entry.stop.clone();
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = handshake::accept(socket) => accepted,
        };
        match accepted {
            Ok(handed_off) => interceptor::run(handed_off, tools, stop, buffers).await,
            Err(error) => {
                tracing::debug!(session = %entry.session, %error, "hand-off refused");
            }
        }
    });
    Ok(())
}

/// The tools of one session.
struct SessionLocalTools {
    app: Weak<App>,
    plane: Arc<ToolPlane>,
    session: SessionId,
    /// The runtime of the rest of the server.
    main_runtime: Handle,
}

impl interceptor::LocalTools for SessionLocalTools {
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        key: Option<&str>,
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    ) -> Option<interceptor::PendingResult> {
        let reserved = ToolAddress::of_reserved_name(name);
        let api_key = match &reserved {
            // Without a key the client handles it, as a name like any other.
            Some(ToolAddress::Oubliette(_)) => Some(key?.to_owned()),
            _ => None,
        };
        // Oubliette's own tools and the base tools may start sessions and the like, which would hold up this thread.
        let main_runtime = reserved.is_some().then(|| self.main_runtime.clone());
        let tool = match reserved {
            Some(address) => RequestedTool::At(address),
            None => RequestedTool::ByName(name.to_owned()),
        };
        let app = self.app.upgrade()?;
        let ctx = CallContext {
            cancel,
            turn: app.sessions.current_turn(&self.session),
            progress,
        };
        let (plane, session) = (self.plane.clone(), self.session.clone());
        let arguments = serde_json::from_str(arguments.get());
        let unknown = api_key.clone().filter(|key| !plane.is_hidden(key));
        plane.thread().note_activity();
        let answer = async move {
            let arguments = arguments.map_err(|why| Error::invalid(format!("arguments: {why}")))?;
            if let Some(key) = unknown {
                relay::hide_valid_key(&app, &plane, &key).await;
            }
            // A call may take long, and must not keep the server alive meanwhile.
            drop(app);
            let answer = plane
                .call_raw(tool, arguments, CallOrigin::Inside { api_key }, ctx)
                .await
                .map_err(Error::from);
            if let Err(error) = &answer
                && error.has_cause()
            {
                tracing::error!(%session, error = %error.for_log(), "a call over handed-off streams failed");
            }
            plane.thread().note_activity();
            answer
        };
        Some(match main_runtime {
            None => Box::pin(answer),
            Some(runtime) => {
                let task = runtime.spawn(answer);
                Box::pin(async { task.await.unwrap_or_else(|why| Err(Error::internal(why))) })
            }
        })
    }
}
