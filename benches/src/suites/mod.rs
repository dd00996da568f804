//! The benchmark suites.

mod approvals;
mod cluster;
mod foundation;
mod orchestration;
mod own_tools;
mod peers;
mod programs;
mod relay;
mod sessions;

use anyhow::Result;

use crate::report::BenchReport;

/// How many repetitions a measurement has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum BenchEffort {
    Full,
    Quick,
}

impl BenchEffort {
    /// `full` repetitions, or a tenth of them (at least 3) in a quick run.
    pub(crate) fn scale(self, full: usize) -> usize {
        match self {
            BenchEffort::Full => full,
            BenchEffort::Quick => (full / 10).max(3),
        }
    }
}

/// A benchmark suite.
#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
pub(crate) enum BenchSuite {
    /// Server start, memory, long lists, the cost of a call.
    Foundation,
    /// Agent start, the event log, many sessions.
    Sessions,
    /// Tools that callers lend.
    Relay,
    /// Oubliette's own tools, called from inside a sandbox.
    Own,
    /// Tool servers, context builds, agent switches, name resolution.
    Orchestration,
    /// A real agent and a real tool server from installed packages.
    Programs,
    /// Rules with arguments, waiting approvals, the reading of usage.
    Approvals,
    /// PostgreSQL, and several servers on one database.
    Cluster,
    /// The tool plane beside other MCP proxies.
    Peers,
}

impl BenchSuite {
    pub(crate) const ALL: [BenchSuite; 9] = [
        BenchSuite::Foundation,
        BenchSuite::Sessions,
        BenchSuite::Relay,
        BenchSuite::Own,
        BenchSuite::Orchestration,
        BenchSuite::Programs,
        BenchSuite::Approvals,
        BenchSuite::Cluster,
        BenchSuite::Peers,
    ];

    pub(crate) async fn run(
        self,
        report: &mut BenchReport,
        effort: BenchEffort,
        install: bool,
    ) -> Result<()> {
        match self {
            BenchSuite::Foundation => Box::pin(foundation::run(report, effort)).await,
            BenchSuite::Sessions => Box::pin(sessions::run(report, effort)).await,
            BenchSuite::Relay => Box::pin(relay::run(report, effort)).await,
            BenchSuite::Own => Box::pin(own_tools::run(report, effort)).await,
            BenchSuite::Orchestration => Box::pin(orchestration::run(report, effort)).await,
            BenchSuite::Programs => Box::pin(programs::run(report, effort)).await,
            BenchSuite::Approvals => Box::pin(approvals::run(report, effort)).await,
            BenchSuite::Cluster => Box::pin(cluster::run(report, effort)).await,
            BenchSuite::Peers => Box::pin(peers::run(report, effort, install)).await,
        }
    }
}
