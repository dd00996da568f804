//! What is measured.

mod foundation;
mod orchestration;
mod own;
mod peers;
mod relay;
mod sessions;

use anyhow::Result;

use crate::report::Report;

/// How much work goes into a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Effort {
    Full,
    Quick,
}

impl Effort {
    /// So many, or a tenth.
    pub(crate) fn of(self, full: usize) -> usize {
        match self {
            Effort::Full => full,
            Effort::Quick => (full / 10).max(3),
        }
    }
}

/// A suite.
#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
pub(crate) enum Suite {
    /// Start, memory, lists, the cost of a call.
    Foundation,
    /// Start of an agent, the event log, many sessions.
    Sessions,
    /// Tools that callers lend.
    Relay,
    /// Oubliette's own tools from inside.
    Own,
    /// Tool servers, contexts, switches, names.
    Orchestration,
    /// The tool plane beside other MCP proxies.
    Peers,
}

impl Suite {
    pub(crate) const ALL: [Suite; 6] = [
        Suite::Foundation,
        Suite::Sessions,
        Suite::Relay,
        Suite::Own,
        Suite::Orchestration,
        Suite::Peers,
    ];

    pub(crate) async fn run(self, report: &mut Report, effort: Effort, install: bool) -> Result<()> {
        match self {
            Suite::Foundation => Box::pin(foundation::run(report, effort)).await,
            Suite::Sessions => Box::pin(sessions::run(report, effort)).await,
            Suite::Relay => Box::pin(relay::run(report, effort)).await,
            Suite::Own => Box::pin(own::run(report, effort)).await,
            Suite::Orchestration => Box::pin(orchestration::run(report, effort)).await,
            Suite::Peers => Box::pin(peers::run(report, effort, install)).await,
        }
    }
}
