//! The ACP methods this agent implements, served over stdio.
//!
//! Messages are handled one at a time, so a handler does only what depends on their order and spawns a
//! task for the rest. A task that panics drops its responder, which answers the request with an error
//! and leaves the process running.

use std::sync::{Arc, Mutex, PoisonError};

use agent_client_protocol::{
    Agent, ByteStreams, Client, Error, ErrorCode, on_receive_notification, on_receive_request,
    schema::ProtocolVersion,
    v1::{
        ConnectionTo,
        schema::{
            AgentCapabilities, AuthenticateRequest, AuthenticateResponse, CancelNotification, Implementation,
            InitializeRequest, InitializeResponse, LoadSessionRequest, LoadSessionResponse, McpServer,
            NewSessionRequest, NewSessionResponse, PromptCapabilities, PromptRequest, SessionId,
        },
    },
};
use tokio_util::compat::{TokioAsyncReadCompatExt, TokioAsyncWriteCompatExt};

use crate::{config::AgentProcessConfig, session::AgentSession};

/// The state shared by all handlers. One process has one session: the host stores one memory per
/// process, so a second conversation would read the first one's.
struct AcpState {
    config: Result<Arc<AgentProcessConfig>, String>,
    session: Mutex<Option<Arc<AgentSession>>>,
}

/// Serves stdio until stdin closes.
pub(crate) async fn serve(config: Result<AgentProcessConfig, String>) -> Result<(), Error> {
    let host = Arc::new(AcpState {
        config: config.map(Arc::new),
        session: Mutex::new(None),
    });
    let (new, load, prompt, cancel) = (host.clone(), host.clone(), host.clone(), host);
    let stdio = ByteStreams::new(tokio::io::stdout().compat_write(), tokio::io::stdin().compat());
    Agent
        .v1()
        .name("oubliette-agent")
        .on_receive_request(
            async move |_request: InitializeRequest, responder, _connection| {
                responder.respond(initialize_response())
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |_request: AuthenticateRequest, responder, _connection| {
                responder.respond(AuthenticateResponse::default())
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: NewSessionRequest, responder, connection| {
                let host = new.clone();
                tokio::spawn(async move {
                    let id = SessionId::new(format!("agent_{}", std::process::id()));
                    let opened = host
                        .open_session(id.clone(), connection, &request.mcp_servers, &request.cwd)
                        .await;
                    responder.respond_with_result(opened.map(|()| NewSessionResponse::new(id)))
                });
                Ok(())
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: LoadSessionRequest, responder, connection| {
                let host = load.clone();
                tokio::spawn(async move {
                    let opened = host
                        .open_session(request.session_id, connection, &request.mcp_servers, &request.cwd)
                        .await;
                    responder.respond_with_result(opened.map(|()| LoadSessionResponse::new()))
                });
                Ok(())
            },
            on_receive_request!(),
        )
        .on_receive_request(
            async move |request: PromptRequest, responder, _connection| {
                let session = match prompt.session(&request.session_id) {
                    Ok(session) => session,
                    Err(error) => return responder.respond_with_error(error),
                };
                let Some(running) = session.begin_turn() else {
                    return responder.respond_with_error(Error::new(
                        ErrorCode::INVALID_REQUEST.value(),
                        "a turn is running; cancel it or wait for its end",
                    ));
                };
                tokio::spawn(async move {
                    let withdrawn = responder.cancellation();
                    let outcome = {
                        let mut turn = std::pin::pin!(session.run_turn(&request.prompt, &running.cancel));
                        tokio::select! {
                            outcome = &mut turn => outcome,
                            () = withdrawn.cancelled() => {
                                running.cancel.cancel();
                                turn.await
                            }
                        }
                    };
                    // Released before the answer is sent: the host may send the next prompt as soon as it has it.
                    drop(running);
                    responder.respond_with_result(outcome)
                });
                Ok(())
            },
            on_receive_request!(),
        )
        .on_receive_notification(
            async move |notice: CancelNotification, _connection| {
                if let Ok(session) = cancel.session(&notice.session_id) {
                    session.cancel();
                }
                Ok(())
            },
            on_receive_notification!(),
        )
        .connect_to(stdio)
        .await
}

fn initialize_response() -> InitializeResponse {
    let capabilities = AgentCapabilities::new()
        .load_session(true)
        .prompt_capabilities(PromptCapabilities::new().embedded_context(true));
    InitializeResponse::new(ProtocolVersion::V1)
        .agent_capabilities(capabilities)
        .agent_info(Implementation::new("oubliette-agent", env!("CARGO_PKG_VERSION")))
}

impl AcpState {
    async fn open_session(
        &self,
        id: SessionId,
        connection: ConnectionTo<Client>,
        servers: &[McpServer],
        cwd: &std::path::Path,
    ) -> Result<(), Error> {
        let config = self
            .config
            .clone()
            .map_err(|e| Error::new(ErrorCode::INVALID_PARAMS.value(), e))?;
        let opened = AgentSession::open(id, config, connection, servers, cwd).await?;
        if let Some(before) = self.lock().replace(opened) {
            before.cancel();
        }
        Ok(())
    }

    fn session(&self, id: &SessionId) -> Result<Arc<AgentSession>, Error> {
        let held = self.lock().clone().filter(|session| session.id() == id);
        held.ok_or_else(|| {
            Error::new(
                ErrorCode::RESOURCE_NOT_FOUND.value(),
                format!("there is no session {id}"),
            )
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<AgentSession>>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
