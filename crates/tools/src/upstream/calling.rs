//! Calls on a connection: sent, answered, given up or lost.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use oubliette_protocol::{Error, Object, Result, tool::CallResult};
use rmcp::{
    RoleClient,
    model::{CallToolRequest, CallToolRequestParams, ClientRequest, ServerResult},
    service::{PeerRequestOptions, RequestHandle, ServiceError},
};
use tokio::time::timeout;

use super::{
    connection::Connection,
    fault::{bounded, chain},
    http::HttpError,
    limits,
    traffic::{Answer, Attached, ForHttp, read_result},
    wire::NotSent,
};
use crate::CallContext;

impl Connection {
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
