//! The agent's end: stdin and stdout, handed off to the server or not.

use std::{
    io,
    os::fd::AsFd,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use oubliette_handoff::{
    agent_output::AgentOutput,
    handshake::{HandoffReader, hand_off},
};
use oubliette_protocol::ByteBudget;
use rmcp::transport::io::{StdioReader, stdio_pipes};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::sync::CancellationToken;

/// How much may wait to be written to the agent before no more is read from it, in bytes. Large: an agent may write
/// many calls before it reads the first answer.
const BACKLOG: usize = 64 * 1024 * 1024;

/// Both directions of the conversation with the agent.
pub(crate) struct AgentStreams {
    pub(crate) input: AgentInput,
    pub(crate) output: Arc<AgentOutput>,
    /// Fires when the server is gone that stdin and stdout were handed off to: nobody reads or writes them any longer.
    pub(crate) server_gone: CancellationToken,
}

/// Hands stdin and stdout off if there is a hand-off socket and the server accepts; otherwise they are used here.
pub(crate) async fn open(handoff_socket: Option<&Path>, key: Option<&str>) -> AgentStreams {
    let handed_off = match handoff_socket {
        Some(socket) => hand_off(socket, io::stdin().as_fd(), io::stdout().as_fd(), key)
            .await
            .ok(),
        None => None,
    };
    let server_gone = CancellationToken::new();
    let (input, output) = match handed_off {
        Some(handoff) => {
            let (reader, writer) = handoff.into_split();
            let input = AgentInput::HandedOff {
                reader,
                server_gone: server_gone.clone(),
            };
            (input, AgentOutput::start(writer, BACKLOG, ByteBudget::default()))
        }
        // The server refused, or does not listen yet: the relay socket is enough.
        None => {
            let (reader, writer) = stdio_pipes();
            (
                AgentInput::Stdin(reader),
                AgentOutput::start(writer, BACKLOG, ByteBudget::default()),
            )
        }
    };
    AgentStreams {
        input,
        output,
        server_gone,
    }
}

/// What the agent writes.
pub(crate) enum AgentInput {
    Stdin(StdioReader),
    /// What the server forwards: everything but the calls that it answers itself.
    HandedOff {
        reader: HandoffReader,
        server_gone: CancellationToken,
    },
}

impl AsyncRead for AgentInput {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Stdin(stdin) => Pin::new(stdin).poll_read(context, buf),
            Self::HandedOff { reader, server_gone } => {
                let read = ready!(Pin::new(reader).poll_read(context, buf));
                if read.is_err() {
                    server_gone.cancel();
                }
                Poll::Ready(read)
            }
        }
    }
}
