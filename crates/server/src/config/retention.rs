//! `[retention]`: how long what is recorded is kept.

use std::time::Duration;

use oubliette_protocol::{Result, duration::HumanDuration};

use super::{field_error, raw::RawRetention};

/// How long what is recorded is kept. None: for ever.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RetentionPeriods {
    /// Sessions that have ended or failed, with their logs and homes; their workspaces stay.
    pub(crate) sessions: Option<Duration>,
    /// Debugger events.
    pub(crate) debugger: Option<Duration>,
    /// Audit entries.
    pub(crate) audit: Option<Duration>,
    /// Usage records; those of the present day stay, because budgets count them.
    pub(crate) usage: Option<Duration>,
}

/// Resolves `[retention]`. `[debugger] keep` is the older name of `debugger`.
pub(super) fn resolve(raw: RawRetention, debugger_keep: Option<HumanDuration>) -> Result<RetentionPeriods> {
    if raw.debugger.is_some() && debugger_keep.is_some() {
        return Err(field_error(
            "retention.debugger",
            "[debugger] keep says the same under its older name: remove that one",
        ));
    }
    let at_least_a_second = |field: &str, given: Option<HumanDuration>| match given {
        Some(span) if span.0 < Duration::from_secs(1) => {
            Err(field_error(field, "must be at least a second, such as \"30d\""))
        }
        given => Ok(given.map(|span| span.0)),
    };
    Ok(RetentionPeriods {
        sessions: at_least_a_second("retention.sessions", raw.sessions)?,
        debugger: at_least_a_second("retention.debugger", raw.debugger)?
            .or(resolve_debugger_keep(debugger_keep)?),
        audit: at_least_a_second("retention.audit", raw.audit)?,
        usage: at_least_a_second("retention.usage", raw.usage)?,
    })
}

/// Resolves `[debugger] keep`: at least a minute, so that events of running sessions can still be read.
fn resolve_debugger_keep(given: Option<HumanDuration>) -> Result<Option<Duration>> {
    match given {
        Some(span) if span.0 < Duration::from_secs(60) => Err(field_error(
            "debugger.keep",
            "must be at least a minute, such as \"30d\"",
        )),
        given => Ok(given.map(|span| span.0)),
    }
}
