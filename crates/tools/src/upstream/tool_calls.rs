//! Tool calls over a connection: sending, waiting for the result, cancellation, timeout and loss.

use std::sync::atomic::Ordering;

use oubliette_protocol::{Error, JsonObject, OverBudget, Result, tool::CallResult};
use rmcp::{
    RoleClient,
    model::{CallToolRequest, CallToolRequestParams, ClientRequest, ServerResult},
    service::{PeerRequestOptions, RequestHandle, ServiceError},
};
use tokio::time::timeout;

use super::{
    connection::UpstreamConnection,
    direct_call::DirectCall,
    envelope::read_result,
    fault::{error_chain, truncate_error},
    handshake::ClientTransport,
    http::HttpError,
    limits,
    traffic::{CallReply, HttpResultVisibility, ReceivedResult, RequestAttachment, ResultSlot},
    wire::SendFailure,
};
use crate::{
    CallContext,
    call::{RawCallResult, ToolAnswer},
};

impl UpstreamConnection {
    /// Calls a tool. A call whose connection is lost fails at once and is never repeated, since the server may
    /// have executed it.
    pub(super) async fn call(
        &self,
        tool: &str,
        arguments: &JsonObject,
        ctx: &CallContext,
    ) -> Result<ToolAnswer> {
        let deadline = tokio::time::sleep(self.request_timeout);
        tokio::pin!(deadline);
        let mut sent = match &self.resources.transport {
            Some(ClientTransport::Wire(wire)) => {
                let sent = DirectCall::send(wire, &self.metadata, tool, arguments, ctx.progress.clone());
                SentCall::Direct(sent.map_err(|why| self.send_failure_error(&why))?)
            }
            _ => tokio::select! {
                biased;
                sent = Box::pin(self.send_via_library(tool, arguments.clone(), ctx)) => SentCall::Library(Box::new(sent?)),
                () = ctx.cancel.cancelled() => return Err(self.cancelled_error()),
                () = &mut deadline => return Err(self.timeout_error()),
            },
        };
        let answered = tokio::select! {
            biased;
            answered = sent.wait_result(self) => answered,
            reason = self.closed.wait() => {
                // The server's last response may still be in the pipe.
                match timeout(limits::DRAIN_TIMEOUT / 2, sent.wait_result(self)).await {
                    Ok(Ok(answered)) => Ok(answered),
                    Ok(Err(CallFailure::Refused(error))) => Err(CallFailure::Refused(error)),
                    Ok(Err(CallFailure::BrokenOff)) | Err(_) => return Err(self.outcome_unknown_error(&reason)),
                }
            }
            // Dropping `sent` sends `notifications/cancelled`.
            () = ctx.cancel.cancelled() => return Err(self.cancelled_error()),
            () = &mut deadline => return Err(self.timeout_error()),
        };
        let result = match answered {
            Ok(result) => result,
            Err(CallFailure::Refused(error)) => return Err(error),
            Err(CallFailure::BrokenOff) => {
                // The reason follows shortly when the whole connection ended; it does not when only this
                // response was cut off.
                let wait = match self.resources.process {
                    Some(_) => limits::EXIT_TIMEOUT,
                    None => limits::DRAIN_TIMEOUT,
                };
                let reason = timeout(wait, self.closed.wait()).await;
                return Err(
                    self.outcome_unknown_error(reason.as_deref().unwrap_or("it broke off its answer"))
                );
            }
        };
        self.has_answered.store(true, Ordering::Relaxed);
        let Some(result) = result else {
            return Ok(ToolAnswer::Result(CallResult::default()));
        };
        if let Some(text) = RawCallResult::validate(&result.text) {
            return Ok(ToolAnswer::Text(text.with_charge(result.charge)));
        }
        read_result(&result.text).map(ToolAnswer::Result).map_err(|why| {
            Error::tool_error(format!("tool server {}: {}", self.server, truncate_error(&why)))
        })
    }

    async fn send_via_library(
        &self,
        tool: &str,
        arguments: JsonObject,
        ctx: &CallContext,
    ) -> Result<LibraryCall> {
        let result_slot = ResultSlot::default();
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let mut request = CallToolRequest::new(params);
        request.extensions.insert(RequestAttachment {
            result_slot: result_slot.clone(),
            progress: ctx.progress.clone(),
            http_visibility: HttpResultVisibility::Hidden,
        });
        let handle = self
            .peer
            .send_cancellable_request(
                ClientRequest::CallToolRequest(request),
                PeerRequestOptions::no_options(),
            )
            .await
            .map_err(|error| self.service_error(error))?;
        Ok(LibraryCall {
            handle: Some(handle),
            result_slot,
        })
    }

    fn timeout_error(&self) -> Error {
        let limit = self.request_timeout.as_millis();
        Error::timeout(format!(
            "tool server {} did not answer within {limit} ms; it was told to stop",
            self.server
        ))
    }

    fn cancelled_error(&self) -> Error {
        Error::unavailable(format!(
            "the call was cancelled; tool server {} was told to stop",
            self.server
        ))
    }

    fn outcome_unknown_error(&self, reason: &str) -> Error {
        Error::unavailable(format!(
            "tool server {} was lost during the call ({reason}): outcome unknown; the call was not repeated",
            self.server
        ))
    }

    fn not_sent_error(&self, reason: &str) -> Error {
        Error::unavailable(format!(
            "tool server {} did not get the call: {reason}",
            self.server
        ))
    }

    fn send_failure_error(&self, why: &SendFailure) -> Error {
        match why {
            SendFailure::NotWritten(why) => self.not_sent_error(why),
            SendFailure::OverBudget(over) => self.over_budget_error("did not get the call", *over),
            SendFailure::MaybeWritten(why) => self.outcome_unknown_error(why),
        }
    }

    fn over_budget_error(&self, what: &str, over: OverBudget) -> Error {
        Error::limit_exceeded(format!("tool server {} {what}: {over}", self.server))
    }

    fn refusal_error(&self, message: &str) -> Error {
        self.has_answered.store(true, Ordering::Relaxed);
        Error::tool_error(self.resources.secrets.mask_text(truncate_error(message)))
    }

    fn service_error(&self, error: ServiceError) -> Error {
        let text = |error: &(dyn std::error::Error + 'static)| {
            self.resources
                .secrets
                .mask_text(truncate_error(&error_chain(error)))
        };
        match error {
            ServiceError::McpError(error) => self.refusal_error(&error.message),
            ServiceError::TransportSend(error) => {
                let cause = &*error.error;
                match cause.downcast_ref::<HttpError>() {
                    Some(HttpError::Client(cause)) if cause.is_connect() => self.not_sent_error(&text(cause)),
                    Some(HttpError::Client(cause)) => self.outcome_unknown_error(&text(cause)),
                    Some(HttpError::Io(cause)) if let Some(over) = over_budget(cause) => {
                        self.over_budget_error("did not get the call", over)
                    }
                    Some(cause) => {
                        Error::unavailable(format!("tool server {}: {}", self.server, text(cause)))
                    }
                    None => self.outcome_unknown_error(&text(cause)),
                }
            }
            other => self.outcome_unknown_error(&text(&other)),
        }
    }
}

/// The budget that an error is about, if it is.
fn over_budget(error: &std::io::Error) -> Option<OverBudget> {
    error.get_ref()?.downcast_ref().copied()
}

/// A call that was sent. Dropping it before the result sends `notifications/cancelled`.
enum SentCall {
    Direct(DirectCall),
    Library(Box<LibraryCall>),
}

/// Why a call has no result.
enum CallFailure {
    /// The server answered with an error, or never received the call.
    Refused(Error),
    /// The connection, or this response, ended before the result was complete.
    BrokenOff,
}

impl SentCall {
    /// Waits for the result as it stands on the wire. Cancel-safe: it may be dropped and awaited again.
    async fn wait_result(
        &mut self,
        connection: &UpstreamConnection,
    ) -> Result<Option<ReceivedResult>, CallFailure> {
        let over_budget = |over: OverBudget| {
            CallFailure::Refused(connection.over_budget_error("answered, but there is no room for it", over))
        };
        match self {
            SentCall::Direct(sent) => match (&mut sent.reply).await {
                Ok(CallReply::Result(result)) => result.map(Some).map_err(over_budget),
                Ok(CallReply::Refused(message)) => {
                    Err(CallFailure::Refused(connection.refusal_error(&message)))
                }
                Ok(CallReply::SendFailed(why)) => {
                    Err(CallFailure::Refused(connection.send_failure_error(&why)))
                }
                Err(_) => Err(CallFailure::BrokenOff),
            },
            SentCall::Library(sent) => {
                let Some(handle) = &mut sent.handle else {
                    return Err(CallFailure::BrokenOff);
                };
                let response = (&mut handle.rx).await;
                sent.handle = None;
                match response {
                    Ok(Ok(ServerResult::EmptyResult(_))) => {
                        let received = sent.result_slot.lock().take();
                        received.transpose().map_err(over_budget)
                    }
                    // A result that did not pass the filter, such as one on a resumed HTTP stream.
                    Ok(Ok(other)) => Ok(serde_json::to_vec(&other).ok().map(|text| ReceivedResult {
                        text: text.into(),
                        charge: None,
                    })),
                    Ok(Err(ServiceError::TransportClosed)) | Err(_) => Err(CallFailure::BrokenOff),
                    Ok(Err(error)) => Err(CallFailure::Refused(connection.service_error(error))),
                }
            }
        }
    }
}

/// A call sent by the MCP library, as over HTTP.
struct LibraryCall {
    /// `None` once the call is answered.
    handle: Option<RequestHandle<RoleClient>>,
    result_slot: ResultSlot,
}

impl Drop for LibraryCall {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = timeout(
                    limits::CLOSE_TIMEOUT,
                    handle.cancel(Some("nobody waits for it any more".into())),
                )
                .await;
            });
        }
    }
}
