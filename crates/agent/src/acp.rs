//! The ACP methods this agent answers.
//!
//! A handler holds up every message behind it, so each only claims what order matters for and hands
//! the work to a task of its own. A task that panics drops its responder, which answers the request
//! with an error: the process lives on.

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

use crate::{config::Config, session::Session};

/// What the handlers share. One process holds one session: its memory is the host's for this
/// process, so a second conversation would read the first one's.
struct Host {
    config: Result<Arc<Config>, String>,
    session: Mutex<Option<Arc<Session>>>,
}

/// Serves stdio until stdin closes.
pub(crate) async fn serve(config: Result<Config, String>) -> Result<(), Error> {
    let host = Arc::new(Host {
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
                responder.respond(introduction())
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
                        .open(id.clone(), connection, &request.mcp_servers, &request.cwd)
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
                        .open(request.session_id, connection, &request.mcp_servers, &request.cwd)
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
                let Some(running) = session.begin() else {
                    return responder.respond_with_error(Error::new(
                        ErrorCode::INVALID_REQUEST.value(),
                        "a turn is running; cancel it or wait for its end",
                    ));
                };
                tokio::spawn(async move {
                    let withdrawn = responder.cancellation();
                    let outcome = {
                        let mut turn = std::pin::pin!(session.turn(&request.prompt, &running.cancel));
                        tokio::select! {
                            outcome = &mut turn => outcome,
                            () = withdrawn.cancelled() => {
                                running.cancel.cancel();
                                turn.await
                            }
                        }
                    };
                    // Released before the answer: the next prompt may follow on its heels.
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

fn introduction() -> InitializeResponse {
    let capabilities = AgentCapabilities::new()
        .load_session(true)
        .prompt_capabilities(PromptCapabilities::new().embedded_context(true));
    InitializeResponse::new(ProtocolVersion::V1)
        .agent_capabilities(capabilities)
        .agent_info(Implementation::new("oubliette-agent", env!("CARGO_PKG_VERSION")))
}

impl Host {
    async fn open(
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
        let opened = Session::open(id, config, connection, servers, cwd).await?;
        if let Some(before) = self.lock().replace(opened) {
            before.cancel();
        }
        Ok(())
    }

    fn session(&self, id: &SessionId) -> Result<Arc<Session>, Error> {
        let held = self.lock().clone().filter(|session| session.id() == id);
        held.ok_or_else(|| {
            Error::new(
                ErrorCode::RESOURCE_NOT_FOUND.value(),
                format!("there is no session {id}"),
            )
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<Session>>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
