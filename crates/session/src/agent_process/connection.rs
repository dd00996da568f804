//! [`AcpConnection`]: JSON-RPC over stdin and stdout with an agent that may be broken or hostile.
//!
//! The crate `agent-client-protocol` provides the message types; its connection is not used, because it queues
//! what the agent writes without bound. Here a line is read only when the session asks for one, so an agent
//! that writes too much blocks on its own pipe, and the queue to an agent that does not read is bounded. The line, the
//! message it becomes and the queue are charged to the session's budget.

use std::collections::VecDeque;

use oubliette_protocol::{ByteBudget, ByteCharge, Error, OverBudget, budget::parsed_bytes, relay::RpcError};
use oubliette_relay::{
    CloseReason, LineSplitter, RejectedLine, RpcId, RpcMessage, message::AnswerError, parse_line,
};
use serde::Serialize;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
};

use crate::config::AgentOutputLimits;

/// How many messages may be queued for an agent's stdin; when the queue is full, the agent does not read.
const OUTGOING_QUEUE_LEN: usize = 256;
/// How many lines that are not ACP are kept, to be shown when the agent fails.
const MAX_REJECTED_LINES: usize = 8;
/// The largest message of an agent that is not charged.
const UNCHARGED_BYTES: usize = 64 * 1024;

/// Why the connection to an agent cannot be used any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AcpConnectionError {
    #[error("it closed its output")]
    Closed,
    #[error("it wrote a line longer than {0} bytes")]
    LineTooLong(usize),
    #[error("it wrote {0} lines that are not ACP, the last: {1}")]
    InvalidLines(usize, String),
    #[error("it does not read what it is sent")]
    NotReading,
    #[error("{0}")]
    OverBudget(#[from] OverBudget),
}

/// A message from an agent.
#[derive(Debug)]
pub(crate) enum AgentMessage {
    Request {
        id: RpcId,
        method: String,
        params: Value,
    },
    Notification {
        method: String,
        params: Value,
    },
    Response {
        id: u64,
        outcome: Result<Value, RpcError>,
    },
}

type BoxedReader = Box<dyn AsyncRead + Send + Sync + Unpin>;

/// The ACP connection to one agent process.
pub(crate) struct AcpConnection {
    lines: LineSplitter<BoxedReader>,
    outgoing: mpsc::Sender<OutgoingLine>,
    next_id: u64,
    invalid_lines: usize,
    /// The last lines that were not ACP, cut.
    rejected_lines: VecDeque<String>,
    limits: AgentOutputLimits,
    budget: ByteBudget,
    /// What the last received message is charged, until the next is received.
    message_charge: ByteCharge,
}

/// A line to the agent, and what it is charged until it is written.
type OutgoingLine = (Vec<u8>, ByteCharge);

impl AcpConnection {
    pub(crate) fn new(
        stdin: impl AsyncWrite + Send + Unpin + 'static,
        stdout: impl AsyncRead + Send + Sync + Unpin + 'static,
        limits: AgentOutputLimits,
        budget: ByteBudget,
    ) -> Self {
        let (outgoing, queue) = mpsc::channel(OUTGOING_QUEUE_LEN);
        tokio::spawn(write_lines(stdin, queue));
        Self {
            lines: LineSplitter::new(Box::new(stdout), limits.line_bytes, &budget),
            outgoing,
            next_id: 1,
            invalid_lines: 0,
            rejected_lines: VecDeque::new(),
            limits,
            message_charge: budget.empty_charge(),
            budget,
        }
    }

    /// The next message of the agent. The one before has been handled. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<AgentMessage, AcpConnectionError> {
        loop {
            self.message_charge.resize(0)?;
            let line = self.lines.next().await.map_err(|why| match why {
                CloseReason::LineTooLong(limit) => AcpConnectionError::LineTooLong(limit),
                CloseReason::OverBudget(over) => AcpConnectionError::OverBudget(over),
                _ => AcpConnectionError::Closed,
            })?;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let parsed = parsed_bytes(line);
            if parsed > UNCHARGED_BYTES {
                self.message_charge.resize(parsed)?;
            }
            match parse_line(line) {
                Ok(RpcMessage::Request { id, method, params }) => {
                    return Ok(AgentMessage::Request { id, method, params });
                }
                Ok(RpcMessage::Notification { method, params }) => {
                    return Ok(AgentMessage::Notification { method, params });
                }
                Ok(RpcMessage::Response { id, outcome }) => match id.as_ref().and_then(our_request_id) {
                    Some(id) => {
                        return Ok(AgentMessage::Response {
                            id,
                            outcome: outcome.map_err(to_rpc_error),
                        });
                    }
                    None => count_invalid_line(
                        line,
                        &mut self.invalid_lines,
                        &mut self.rejected_lines,
                        &self.limits,
                    )?,
                },
                Err(RejectedLine { id: Some(id), error }) => {
                    count_invalid_line(
                        line,
                        &mut self.invalid_lines,
                        &mut self.rejected_lines,
                        &self.limits,
                    )?;
                    self.answer(id, Err(*error))?;
                }
                Err(RejectedLine { id: None, .. }) => count_invalid_line(
                    line,
                    &mut self.invalid_lines,
                    &mut self.rejected_lines,
                    &self.limits,
                )?,
            }
        }
    }

    /// The end of what the agent wrote to its stdout besides ACP; `None` when it wrote nothing else.
    pub(crate) fn rejected_lines(&self) -> Option<String> {
        let lines: Vec<&str> = self.rejected_lines.iter().map(String::as_str).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// Sends a request; the response arrives later as [`AgentMessage::Response`] with the returned id.
    pub(crate) fn request(
        &mut self,
        method: &str,
        params: &impl Serialize,
    ) -> Result<u64, AcpConnectionError> {
        let id = self.next_id;
        self.next_id += 1;
        self.send(&RpcMessage::Request {
            id: id.into(),
            method: method.into(),
            params: to_json(params),
        })?;
        Ok(id)
    }

    pub(crate) fn notify(&mut self, method: &str, params: &impl Serialize) -> Result<(), AcpConnectionError> {
        self.send(&RpcMessage::Notification {
            method: method.into(),
            params: to_json(params),
        })
    }

    /// Answers a request; with `limit_exceeded` if the agent has not read so many answers that this one does not fit.
    pub(crate) fn answer(
        &mut self,
        id: RpcId,
        outcome: Result<Value, RpcError>,
    ) -> Result<(), AcpConnectionError> {
        let answer = |outcome: Result<Value, RpcError>| RpcMessage::Response {
            id: Some(id.clone()),
            outcome: outcome.map_err(AnswerError::Remote),
        };
        match self.send(&answer(outcome)) {
            Err(AcpConnectionError::OverBudget(over)) => {
                self.send(&answer(Err(RpcError::from(&Error::from(over)))))
            }
            sent => sent,
        }
    }

    fn send(&mut self, message: &RpcMessage) -> Result<(), AcpConnectionError> {
        let Ok(line) = message.to_line(usize::MAX) else {
            return Ok(());
        };
        let charge = self.budget.charge(line.len())?;
        self.outgoing.try_send((line, charge)).map_err(|why| match why {
            mpsc::error::TrySendError::Full(_) => AcpConnectionError::NotReading,
            mpsc::error::TrySendError::Closed(_) => AcpConnectionError::Closed,
        })
    }
}

/// Skips a line that is not ACP, because some agents log to stdout. Fails when there were too many.
fn count_invalid_line(
    line: &[u8],
    count: &mut usize,
    kept: &mut VecDeque<String>,
    limits: &AgentOutputLimits,
) -> Result<(), AcpConnectionError> {
    *count += 1;
    let shown: String = String::from_utf8_lossy(line).chars().take(200).collect();
    tracing::debug!(line = shown, "an agent wrote a line that is not ACP");
    if kept.len() >= MAX_REJECTED_LINES {
        kept.pop_front();
    }
    kept.push_back(shown.clone());
    match *count >= limits.invalid_lines {
        true => Err(AcpConnectionError::InvalidLines(*count, shown)),
        false => Ok(()),
    }
}

fn our_request_id(id: &RpcId) -> Option<u64> {
    match id {
        RpcId::Number(number) => number.as_u64(),
        // Some agents return the id as a string.
        RpcId::Text(text) => text.parse().ok(),
    }
}

fn to_rpc_error(error: AnswerError) -> RpcError {
    match error {
        AnswerError::Remote(error) => error,
        AnswerError::Malformed(why) => RpcError {
            code: -32603,
            message: why,
            data: None,
        },
    }
}

fn to_json(params: &impl Serialize) -> Value {
    serde_json::to_value(params).unwrap_or(Value::Null)
}

async fn write_lines(mut stdin: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<OutgoingLine>) {
    while let Some((line, _charge)) = queue.recv().await {
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn connect(output: &'static [u8], invalid_lines: usize) -> AcpConnection {
        AcpConnection::new(
            tokio::io::sink(),
            output,
            AgentOutputLimits {
                invalid_lines,
                ..AgentOutputLimits::default()
            },
            ByteBudget::default(),
        )
    }

    #[tokio::test]
    async fn invalid_lines_are_skipped_up_to_the_limit() {
        let output = b"starting up\n{\"half\":\n\n{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n[1]\n17\n";
        let mut connection = connect(output, 4);
        assert!(
            matches!(connection.receive().await, Ok(AgentMessage::Response { id: 1, outcome: Ok(v) }) if v == json!({}))
        );
        assert_eq!(
            connection.receive().await.unwrap_err(),
            AcpConnectionError::InvalidLines(4, "17".into())
        );
    }

    #[tokio::test]
    async fn a_full_queue_to_an_agent_that_does_not_read_is_an_error() {
        let (near, _far) = tokio::io::duplex(16);
        let limits = AgentOutputLimits::default();
        let mut connection = AcpConnection::new(near, &b""[..], limits, ByteBudget::default());
        let error = (0..10_000).find_map(|_| {
            connection
                .notify("session/cancel", &json!({ "text": "x".repeat(100) }))
                .err()
        });
        assert_eq!(error, Some(AcpConnectionError::NotReading));
    }

    #[tokio::test]
    async fn answers_that_nobody_reads_stay_within_the_budget() {
        let (near, far) = tokio::io::duplex(16);
        let budget = ByteBudget::new("session_buffer_mb", 1_000_000);
        let limits = AgentOutputLimits::default();
        let mut connection = AcpConnection::new(near, &b""[..], limits, budget.clone());
        for id in 0..100_u64 {
            let answer = json!({ "text": "x".repeat(100_000) });
            connection.answer(id.into(), Ok(answer)).unwrap();
            assert!(budget.used() <= 1_000_000);
        }
        drop(connection);
        let mut lines = LineSplitter::new(far, 1_000_000, &ByteBudget::default());
        let (mut whole, mut refused) = (0, 0);
        while let Ok(line) = lines.next().await {
            match String::from_utf8_lossy(line).contains("limit_exceeded") {
                true => refused += 1,
                false => whole += 1,
            }
        }
        assert!(whole > 5 && whole + refused == 100, "{whole} {refused}");
    }
}
