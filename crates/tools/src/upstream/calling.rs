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
    envelope::read_result,
    fault::{bounded, chain},
    handshake::Link,
    http::HttpError,
    limits,
    straight::Straight,
    traffic::{Answer, Attached, ForHttp, Reply},
    wire::NotSent,
};
use crate::{
    CallContext,
    call::{Given, ResultText},
};

impl Connection {
    /// Calls a tool. One that is lost on the way fails at once and is never repeated: nobody knows what it
    /// did.
    pub(super) async fn call(&self, tool: &str, arguments: &Object, ctx: &CallContext) -> Result<Given> {
        let deadline = tokio::time::sleep(self.request_timeout);
        tokio::pin!(deadline);
        let mut sent = match &self.base.link {
            Some(Link::Wire(wire)) => {
                let sent = Straight::send(wire, &self.stamp, tool, arguments, ctx.progress.clone());
                Sent::Straight(sent.map_err(|why| self.unwritten(&why))?)
            }
            _ => tokio::select! {
                biased;
                sent = Box::pin(self.send_by_client(tool, arguments.clone(), ctx)) => Sent::Client(Box::new(sent?)),
                () = ctx.cancel.cancelled() => return Err(self.cancelled()),
                () = &mut deadline => return Err(self.late()),
            },
        };
        let answered = tokio::select! {
            biased;
            answered = sent.answered(self) => answered,
            reason = self.gone.wait() => {
                // Its last answer may be on the way.
                match timeout(limits::LAST_WORDS / 2, sent.answered(self)).await {
                    Ok(Ok(answered)) => Ok(answered),
                    Ok(Err(Unanswered::Refused(error))) => Err(Unanswered::Refused(error)),
                    Ok(Err(Unanswered::BrokenOff)) | Err(_) => return Err(self.unknown(&reason)),
                }
            }
            // Dropping what was sent tells the server.
            () = ctx.cancel.cancelled() => return Err(self.cancelled()),
            () = &mut deadline => return Err(self.late()),
        };
        let result = match answered {
            Ok(result) => result,
            Err(Unanswered::Refused(error)) => return Err(error),
            Err(Unanswered::BrokenOff) => {
                // Why is known in a moment, unless it is this one answer that was broken off.
                let moment = match self.base.process {
                    Some(_) => limits::EXIT,
                    None => limits::LAST_WORDS,
                };
                let reason = timeout(moment, self.gone.wait()).await;
                return Err(self.unknown(reason.as_deref().unwrap_or("it broke off its answer")));
            }
        };
        self.served.store(true, Ordering::Relaxed);
        let Some(result) = result else {
            return Ok(Given::Result(CallResult::default()));
        };
        if let Some(text) = ResultText::of(&result) {
            return Ok(Given::Text(text));
        }
        read_result(&result)
            .map(Given::Result)
            .map_err(|why| Error::tool_error(format!("tool server {}: {}", self.server, bounded(&why))))
    }

    async fn send_by_client(&self, tool: &str, arguments: Object, ctx: &CallContext) -> Result<ByClient> {
        let answer = Answer::default();
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let mut request = CallToolRequest::new(params);
        request.extensions.insert(Attached {
            answer: answer.clone(),
            progress: ctx.progress.clone(),
            for_http: ForHttp::Hidden,
        });
        let handle = self
            .peer
            .send_cancellable_request(
                ClientRequest::CallToolRequest(request),
                PeerRequestOptions::no_options(),
            )
            .await
            .map_err(|error| self.failed(error))?;
        Ok(ByClient {
            handle: Some(handle),
            answer,
        })
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

    fn unwritten(&self, why: &NotSent) -> Error {
        match why {
            NotSent::Refused(why) => self.unsent(why),
            NotSent::Broken(why) => self.unknown(why),
        }
    }

    fn refused(&self, message: &str) -> Error {
        self.served.store(true, Ordering::Relaxed);
        Error::tool_error(self.base.secrets.mask_text(bounded(message)))
    }

    fn failed(&self, error: ServiceError) -> Error {
        let text =
            |error: &(dyn std::error::Error + 'static)| self.base.secrets.mask_text(bounded(&chain(error)));
        match error {
            ServiceError::McpError(error) => self.refused(&error.message),
            ServiceError::TransportSend(error) => {
                let cause = &*error.error;
                match cause.downcast_ref::<HttpError>() {
                    Some(HttpError::Client(cause)) if cause.is_connect() => self.unsent(&text(cause)),
                    Some(HttpError::Client(cause)) => self.unknown(&text(cause)),
                    Some(cause) => {
                        Error::unavailable(format!("tool server {}: {}", self.server, text(cause)))
                    }
                    None => self.unknown(&text(cause)),
                }
            }
            other => self.unknown(&text(&other)),
        }
    }
}

/// A call that was sent. Dropped before it is answered, it tells the server that nobody waits any more.
enum Sent {
    Straight(Straight),
    Client(Box<ByClient>),
}

/// Why there is no result.
enum Unanswered {
    /// The server said no, or never got the call.
    Refused(Error),
    /// The connection ended, or this answer did.
    BrokenOff,
}

impl Sent {
    /// Waits for the result. May be given up and asked again.
    async fn answered(&mut self, connection: &Connection) -> Result<Option<Bytes>, Unanswered> {
        match self {
            Sent::Straight(sent) => match (&mut sent.reply).await {
                Ok(Reply::Result(result)) => Ok(Some(result)),
                Ok(Reply::Refused(message)) => Err(Unanswered::Refused(connection.refused(&message))),
                Ok(Reply::NotSent(why)) => Err(Unanswered::Refused(connection.unwritten(&why))),
                Err(_) => Err(Unanswered::BrokenOff),
            },
            Sent::Client(sent) => {
                let Some(handle) = &mut sent.handle else {
                    return Err(Unanswered::BrokenOff);
                };
                let response = (&mut handle.rx).await;
                sent.handle = None;
                match response {
                    Ok(Ok(ServerResult::EmptyResult(_))) => Ok(sent.answer.lock().take()),
                    // An answer that came another way, on a resumed stream for one.
                    Ok(Ok(other)) => Ok(serde_json::to_vec(&other).ok().map(Bytes::from)),
                    Ok(Err(ServiceError::TransportClosed)) | Err(_) => Err(Unanswered::BrokenOff),
                    Ok(Err(error)) => Err(Unanswered::Refused(connection.failed(error))),
                }
            }
        }
    }
}

/// A call the client sent.
struct ByClient {
    /// Taken when it is answered.
    handle: Option<RequestHandle<RoleClient>>,
    answer: Answer,
}

impl Drop for ByClient {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take()
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
