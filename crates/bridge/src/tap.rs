//! Between an agent and its client: what the server does with streams it was lent.
//!
//! Ordinary calls are taken out of what the agent writes and answered here; everything else passes to the
//! client as it came, and what the client says passes to the agent, line by line.

use std::{pin::Pin, sync::Arc, time::Duration};

use oubliette_protocol::{
    Error,
    relay::{MAX_LINE, RpcError},
};
use oubliette_relay::{CallError, CallOptions, OnProgress};
use serde_json::value::RawValue;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
};
use tokio_util::sync::CancellationToken;

use crate::{
    call::Answer,
    express::{Calling, Lane, Reach},
    intake::Intake,
    loan::{Borrowed, END, Stdout},
    mcp::LAST_CALLS,
    out::{Out, Outlet},
    outcome::{Source, failed},
    patience::Beat,
};

/// How much may wait for an agent that does not read before it is not heard any longer.
const BACKLOG: usize = 16 * 1024 * 1024;
/// How much is read at once, and what an idle stream keeps.
const CHUNK: usize = 8 * 1024;
/// How long last answers may take to be read.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The answer to a call, when it comes.
pub type Answering = Pin<Box<dyn Future<Output = Result<Box<RawValue>, Error>> + Send>>;

/// The tools at hand.
pub trait Tools: Send + Sync + 'static {
    /// Calls a tool; none when the client is to see to it. The key is the agent's, if it has one. When `cancel`
    /// fires nobody waits any longer: it ends soon, but in order.
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        key: Option<&str>,
        cancel: CancellationToken,
        progress: Option<OnProgress>,
    ) -> Option<(Source, Answering)>;
}

/// Stands between agent and client until either is gone, or until `stop` fires.
pub async fn run(borrowed: Borrowed, tools: impl Tools, stop: CancellationToken) {
    let Borrowed {
        stdin,
        stdout,
        client,
        journal,
        key,
    } = borrowed;
    let journal = Arc::new(journal);
    let LetGo(out) = &LetGo(Out::noting(stdout, BACKLOG, Some(journal.clone())));
    let here = Here {
        tools,
        key,
        beat: Beat::default(),
    };
    let lane = Lane::between(Arc::new(here), out.clone(), journal);
    let (from_client, to_client) = client.into_split();
    // They hold the connection: the client has its streams back when nothing is written here any more.
    let mut inward = std::pin::pin!(inward(Intake::with_chunk(stdin, lane.clone(), CHUNK), to_client));
    let mut outward = std::pin::pin!(outward(from_client, out));
    tokio::select! {
        () = stop.cancelled() => {}
        () = &mut inward => {}
        () = &mut outward => {}
    }
    // Their notes stay: who is still there is told by the client.
    lane.give_up();
    let _ = tokio::time::timeout(LAST_WORDS, out.written(out.mark())).await;
    out.close();
}

/// Lets go of the agent's stream, whatever ends the loan.
struct LetGo(Arc<Out>);

impl Drop for LetGo {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What the agent says and the lane does not take. It ends with the client: one that has heard of the agent's end
/// may have something left to say.
async fn inward<R: AsyncRead + Unpin, C: Reach>(mut agent: Intake<R, C>, mut client: OwnedWriteHalf) {
    let mut bytes = vec![0; CHUNK / 4];
    let ended = agent.ended();
    let mut last = std::pin::pin!(async move {
        ended.cancelled().await;
        tokio::time::sleep(LAST_CALLS).await;
    });
    loop {
        let read = tokio::select! {
            read = agent.read(&mut bytes) => read.unwrap_or(0),
            () = &mut last => 0,
        };
        if read == 0 {
            break;
        }
        if client.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
    if client.write_all(&[END]).await.is_ok() && client.shutdown().await.is_ok() {
        std::future::pending().await
    }
}

/// What the client says, whole lines at a time.
async fn outward(mut client: OwnedReadHalf, out: &Out) {
    let mut bytes = Vec::new();
    loop {
        std::future::poll_fn(|context| out.poll_room(context)).await;
        bytes.reserve(CHUNK / 4);
        match client.read_buf(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if let Some(end) = memchr::memrchr(b'\n', &bytes) {
            out.pass(&bytes[..=end]);
            bytes.drain(..=end);
            bytes.shrink_to(CHUNK);
        }
        if bytes.len() > 2 * MAX_LINE {
            // More than it ever says at once.
            return;
        }
    }
}

impl Outlet for Stdout {}

/// A lane's calls, made here.
struct Here<T> {
    tools: T,
    key: Option<String>,
    beat: Beat,
}

impl<T: Tools> Reach for Here<T> {
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        options: CallOptions,
    ) -> Option<Calling<impl Future<Output = Answer> + Send + 'static + use<T>>> {
        let cancel = CancellationToken::new();
        let key = self.key.as_deref();
        let (source, calling) = self
            .tools
            .call(name, arguments, key, cancel.clone(), options.hearer())?;
        let answer = async move {
            match calling.await {
                Ok(raw) => Answer::Given(source, raw),
                Err(error) => Answer::None(failed(CallError::Remote(RpcError::from(&error)))),
            }
        };
        Some(Calling {
            answer,
            stop: Some(cancel),
        })
    }

    fn beat(&self) -> &Beat {
        &self.beat
    }
}
