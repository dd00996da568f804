//! JSON-RPC with an agent that may be broken or hostile.
//!
//! The crate `agent-client-protocol` gives the messages; its connection is not used, because it queues
//! what the agent writes without bound. Here nothing is read before the session is ready for it, so an
//! agent that floods waits in its own pipe, and nothing is queued for an agent that does not read.

use oubliette_protocol::relay::RpcError;
use oubliette_relay::{Id, Message, Refused, message::AnswerError, parse_line};
use serde::Serialize;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
};

use super::lines::{Lines, NoLine};
use crate::config::Voice;

/// Messages on their way to an agent; one that lets so many pile up does not read.
const OUTGOING: usize = 256;

/// Why an agent cannot be talked to any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Gone {
    #[error("it closed its output")]
    Closed,
    #[error("it wrote a line longer than {0} bytes")]
    LineTooLong(usize),
    #[error("it wrote {0} lines that are not ACP, the last: {1}")]
    Rubbish(usize, String),
    #[error("it does not read what it is sent")]
    NotReading,
}

/// What an agent said.
#[derive(Debug)]
pub(crate) enum Heard {
    Request {
        id: Id,
        method: String,
        params: Value,
    },
    Notification {
        method: String,
        params: Value,
    },
    Answer {
        id: u64,
        outcome: Result<Value, RpcError>,
    },
}

type Input = Box<dyn AsyncRead + Send + Sync + Unpin>;

/// Both directions.
pub(crate) struct Wire {
    lines: Lines<Input>,
    outgoing: mpsc::Sender<Vec<u8>>,
    next_id: u64,
    rubbish: usize,
    voice: Voice,
}

impl Wire {
    pub(crate) fn new(
        stdin: impl AsyncWrite + Send + Unpin + 'static,
        stdout: impl AsyncRead + Send + Sync + Unpin + 'static,
        voice: Voice,
    ) -> Self {
        let (outgoing, queue) = mpsc::channel(OUTGOING);
        tokio::spawn(write(stdin, queue));
        Self {
            lines: Lines::new(Box::new(stdout), voice.line),
            outgoing,
            next_id: 1,
            rubbish: 0,
            voice,
        }
    }

    /// The next thing the agent says. Dropping the future loses nothing.
    pub(crate) async fn hear(&mut self) -> Result<Heard, Gone> {
        loop {
            let line = self.lines.next().await.map_err(|why| match why {
                NoLine::Closed => Gone::Closed,
                NoLine::TooLong => Gone::LineTooLong(self.voice.line),
            })?;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match parse_line(&line) {
                Ok(Message::Request { id, method, params }) => {
                    return Ok(Heard::Request { id, method, params });
                }
                Ok(Message::Notification { method, params }) => {
                    return Ok(Heard::Notification { method, params });
                }
                Ok(Message::Response { id, outcome }) => match id.as_ref().and_then(ours) {
                    Some(id) => {
                        return Ok(Heard::Answer {
                            id,
                            outcome: outcome.map_err(remote),
                        });
                    }
                    None => self.note_rubbish(&line)?,
                },
                Err(Refused { id: Some(id), error }) => {
                    self.note_rubbish(&line)?;
                    self.answer(id, Err(*error))?;
                }
                Err(Refused { id: None, .. }) => self.note_rubbish(&line)?,
            }
        }
    }

    /// Sends a request; its answer is heard under the returned id.
    pub(crate) fn request(&mut self, method: &str, params: &impl Serialize) -> Result<u64, Gone> {
        let id = self.next_id;
        self.next_id += 1;
        self.send(&Message::Request {
            id: id.into(),
            method: method.into(),
            params: value(params),
        })?;
        Ok(id)
    }

    pub(crate) fn notify(&mut self, method: &str, params: &impl Serialize) -> Result<(), Gone> {
        self.send(&Message::Notification {
            method: method.into(),
            params: value(params),
        })
    }

    pub(crate) fn answer(&mut self, id: Id, outcome: Result<Value, RpcError>) -> Result<(), Gone> {
        self.send(&Message::Response {
            id: Some(id),
            outcome: outcome.map_err(AnswerError::Remote),
        })
    }

    fn send(&mut self, message: &Message) -> Result<(), Gone> {
        let Ok(line) = message.to_line(usize::MAX) else {
            return Ok(());
        };
        self.outgoing.try_send(line).map_err(|why| match why {
            mpsc::error::TrySendError::Full(_) => Gone::NotReading,
            mpsc::error::TrySendError::Closed(_) => Gone::Closed,
        })
    }

    /// Some agents log to stdout: a few such lines are passed over.
    fn note_rubbish(&mut self, line: &[u8]) -> Result<(), Gone> {
        self.rubbish += 1;
        let shown: String = String::from_utf8_lossy(line).chars().take(200).collect();
        tracing::debug!(line = shown, "an agent wrote a line that is not ACP");
        match self.rubbish >= self.voice.rubbish {
            true => Err(Gone::Rubbish(self.rubbish, shown)),
            false => Ok(()),
        }
    }
}

fn ours(id: &Id) -> Option<u64> {
    match id {
        Id::Number(number) => number.as_u64(),
        // Some agents give the id back as text.
        Id::Text(text) => text.parse().ok(),
    }
}

fn remote(error: AnswerError) -> RpcError {
    match error {
        AnswerError::Remote(error) => error,
        AnswerError::Malformed(why) => RpcError {
            code: -32603,
            message: why,
            data: None,
        },
    }
}

fn value(params: &impl Serialize) -> Value {
    serde_json::to_value(params).unwrap_or(Value::Null)
}

async fn write(mut stdin: impl AsyncWrite + Unpin, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(line) = queue.recv().await {
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn wire(said: &'static [u8], rubbish: usize) -> Wire {
        Wire::new(
            tokio::io::sink(),
            said,
            Voice {
                rubbish,
                ..Voice::default()
            },
        )
    }

    #[tokio::test]
    async fn rubbish_is_passed_over_until_it_is_too_much() {
        let said = b"starting up\n{\"half\":\n\n{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n[1]\n17\n";
        let mut wire = wire(said, 4);
        assert!(matches!(wire.hear().await, Ok(Heard::Answer { id: 1, outcome: Ok(v) }) if v == json!({})));
        assert_eq!(wire.hear().await.unwrap_err(), Gone::Rubbish(4, "17".into()));
    }

    #[tokio::test]
    async fn an_agent_that_does_not_read_is_given_up() {
        let (near, _far) = tokio::io::duplex(16);
        let mut wire = Wire::new(near, &b""[..], Voice::default());
        let gone = (0..10_000).find_map(|_| {
            wire.notify("session/cancel", &json!({ "text": "x".repeat(100) }))
                .err()
        });
        assert_eq!(gone, Some(Gone::NotReading));
    }
}
