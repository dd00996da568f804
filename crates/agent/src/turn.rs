//! A running turn: the tool calls that scripts and models both make, and a script's steps.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use futures::future::join_all;
use oubliette_protocol::{Object, tool::CallResult};
use tokio_util::sync::CancellationToken;

use crate::{
    script::{Call, Step},
    tools::Tools,
    voice::Voice,
};

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything was said.
    Done,
    /// Somebody cancelled it.
    Cancelled,
    /// The model's answer was cut at its longest.
    TooLong,
    /// The model asked for more rounds than a turn may have.
    TooMany,
    /// The model refused.
    Refused,
}

/// What a turn works with.
pub(crate) struct Turn<'a> {
    /// Counted from 1 over the session's whole life.
    number: usize,
    voice: &'a Voice,
    tools: &'a Tools,
    cancel: &'a CancellationToken,
    calls: AtomicUsize,
}

impl<'a> Turn<'a> {
    pub(crate) fn new(
        number: usize,
        voice: &'a Voice,
        tools: &'a Tools,
        cancel: &'a CancellationToken,
    ) -> Self {
        Self {
            number,
            voice,
            tools,
            cancel,
            calls: AtomicUsize::new(0),
        }
    }

    pub(crate) fn voice(&self) -> &'a Voice {
        self.voice
    }

    pub(crate) fn tools(&self) -> &'a Tools {
        self.tools
    }

    pub(crate) fn cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Runs `work` unless the turn is cancelled first.
    pub(crate) async fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => None,
            done = work => Some(done),
        }
    }

    /// Calls a tool and shows call and result.
    pub(crate) async fn call(&self, tool: &str, arguments: Object) -> CallResult {
        // Unique in the session, over restarts too: the turn's number is remembered.
        let id = format!(
            "call_{}_{}",
            self.number,
            self.calls.fetch_add(1, Ordering::Relaxed) + 1
        );
        self.voice.calling(&id, tool, &arguments);
        let result = self.tools.call(tool, arguments, self.cancel).await;
        self.voice.called(&id, &result);
        result
    }

    /// Shows a call that cannot even be made.
    pub(crate) fn cannot_call(&self, tool: &str, why: String) -> CallResult {
        let id = self.next_id();
        let result = CallResult::error(&oubliette_protocol::Error::invalid(why));
        self.voice.calling(&id, tool, &Object::new());
        self.voice.called(&id, &result);
        result
    }

    /// Unique in the session, over restarts too: the turn's number is remembered.
    fn next_id(&self) -> String {
        format!(
            "call_{}_{}",
            self.number,
            self.calls.fetch_add(1, Ordering::Relaxed) + 1
        )
    }

    /// Follows a script. A call that fails is shown and does not stop it.
    pub(crate) async fn follow(&self, steps: &[Step]) -> Ended {
        for step in steps {
            if self.cancelled() {
                return Ended::Cancelled;
            }
            match step {
                Step::Say(text) => self.voice.say(text.as_str()),
                Step::Call(Call { tool, arguments }) => {
                    self.call(tool, arguments.clone()).await;
                }
                Step::Parallel(calls) => {
                    join_all(
                        calls
                            .iter()
                            .map(|Call { tool, arguments }| self.call(tool, arguments.clone())),
                    )
                    .await;
                }
                Step::SleepMs(millis) => {
                    let _slept = self
                        .unless_cancelled(tokio::time::sleep(Duration::from_millis(*millis)))
                        .await;
                }
            }
        }
        if self.cancelled() {
            Ended::Cancelled
        } else {
            Ended::Done
        }
    }
}
