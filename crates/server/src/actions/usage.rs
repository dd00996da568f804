//! `usage_report`: what sessions used, in sums.

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, Scope, SessionId, usage::UsageTotals};
use oubliette_store::{UsageFilter, UsageGroup, UsageSum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::{ActionCall, ActionHandler, Effect};

/// The most rows of one report.
const MAX_ROWS: u32 = 1000;
/// Reports at once. Each reads all that was used in its time, and the database has few connections for all readers.
static REPORTS: Semaphore = Semaphore::const_new(1);

/// What a report has a row for.
#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(crate) enum ReportGroup {
    /// Each project.
    Project,
    /// Each session.
    Session,
    /// Each agent.
    Agent,
    /// Each model.
    Model,
    /// Each token that started sessions.
    Token,
    /// Each day.
    #[default]
    Day,
}

/// `usage_report`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UsageReporting {
    /// Only what sessions of this project used (`proj_…`). Absent: of all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Only what this session used (`gogol_…`), its children not included. Absent: all.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Only what was used at this time or later, in RFC 3339, for example "2026-01-31T00:00:00Z". Absent: from the first.
    #[serde(default)]
    pub since: Option<String>,
    /// Only what was used before this time, in RFC 3339. Absent: up to now.
    #[serde(default)]
    pub until: Option<String>,
    /// What there is a row for, and its key: "project", "session" (ids), "agent" (slug), "model" (provider/model), "token" (id
    /// of the token that started the session, or owner) or "day" (UTC, YYYY-MM-DD). Default: "day". At most 1000 rows, those
    /// that used most.
    #[serde(default)]
    pub group_by: Option<ReportGroup>,
}

/// Result of `usage_report`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct UsageResult {
    /// The groups that used most, at most 1000; days are in order.
    rows: Vec<UsageRow>,
    /// All together.
    total: UsedSum,
}

/// What one group used.
#[derive(Debug, Serialize, JsonSchema)]
struct UsageRow {
    #[serde(flatten)]
    sum: UsedSum,
    /// The group: an id, a slug, `provider/model` or a day.
    key: String,
}

/// What was used together.
#[derive(Debug, Serialize, JsonSchema)]
struct UsedSum {
    #[serde(flatten)]
    totals: UsageTotals,
    /// Tool calls.
    tool_calls: u64,
    /// Turns.
    turns: u64,
}

impl From<UsageSum> for UsedSum {
    fn from(sum: UsageSum) -> Self {
        Self {
            totals: sum.totals,
            tool_calls: sum.tool_calls,
            turns: sum.turns,
        }
    }
}

impl ActionHandler for UsageReporting {
    type Output = UsageResult;

    const NAME: &'static str = "usage_report";
    const DESCRIPTION: &'static str = "Sum what sessions used: model requests, tokens, cost, tool calls and turns. \
        cached_tokens are part of input_tokens; cost_usd is there where the model has a price; estimated says that an answer \
        did not tell. By model, a turn counts for each model that answered in it and a tool call for the model that answered \
        last before it; total has each once, and also what no model did.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let app = call.app;
        if let Some(id) = &self.project_id {
            call.grant.require_project(id)?;
            call.project(id).await?;
        }
        if let Some(id) = &self.session_id {
            // Not found where the token may not see it.
            app.sessions.get(call.grant.principal(), id).await?;
        }
        let filter = UsageFilter {
            project: self.project_id.or_else(|| call.grant.project().cloned()),
            session: self.session_id,
            since: parse_time("since", self.since.as_deref())?,
            until: parse_time("until", self.until.as_deref())?,
        };
        let group = match self.group_by.unwrap_or_default() {
            ReportGroup::Project => UsageGroup::Project,
            ReportGroup::Session => UsageGroup::Session,
            ReportGroup::Agent => UsageGroup::Agent,
            ReportGroup::Model => UsageGroup::Model,
            ReportGroup::Token => UsageGroup::Token,
            ReportGroup::Day => UsageGroup::Day,
        };
        app.sessions.usage().settle().await?;
        let _one_at_a_time = REPORTS.acquire().await.map_err(Error::internal)?;
        let report = app.store.usage_report(&filter, group, MAX_ROWS).await?;
        let rows = report
            .rows
            .into_iter()
            .map(|(key, sum)| UsageRow { sum: sum.into(), key });
        Ok(UsageResult {
            rows: rows.collect(),
            total: report.total.into(),
        })
    }
}

fn parse_time(field: &str, text: Option<&str>) -> Result<Option<Timestamp>> {
    let parse = |text: &str| {
        text.parse::<Timestamp>().map_err(|_| {
            Error::invalid(format!(
                "{field} must be a time in RFC 3339, such as \"2026-01-31T00:00:00Z\""
            ))
        })
    };
    text.map(parse).transpose()
}
