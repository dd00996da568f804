//! What sessions used: model requests, tool calls and turns. Rows are only added, and stay when their project is
//! deleted: what was spent stays spent.

use std::collections::HashMap;

use jiff::Timestamp;
use oubliette_protocol::{
    Error, ProjectId, Result, SessionId, Slug, TokenId,
    usage::{UsageTotals, UsdNanos},
};

use super::row::{number, optional_text, parsed};
use crate::{
    db::{DbRow, QueryBuilder, query},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

/// Something a session used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageRecord {
    /// Its own id: appending it twice adds it once.
    pub usage_id: String,
    /// When it was used.
    pub ts: Timestamp,
    /// The session that used it.
    pub session_id: SessionId,
    /// The session's project.
    pub project_id: ProjectId,
    /// The other projects of the sessions above it, whose budgets are charged too.
    pub charged_above: Vec<ProjectId>,
    /// The agent that used it.
    pub agent: Slug,
    /// The token that started the session, or the topmost one above it; none: the home's owner.
    pub token_id: Option<TokenId>,
    /// `provider/model`: the model that was asked, or that made the tool calls; none if no model did.
    pub model: Option<String>,
    /// Requests, tokens and cost.
    pub totals: UsageTotals,
    /// Tool calls.
    pub tool_calls: u64,
    /// Turns that ended.
    pub turns: u64,
    /// Turns that ended and in which `model` answered. A turn has one for each of its models, so their sum over models may
    /// be more than the turns there were.
    pub model_turns: u64,
}

/// What was used in a span of time by the sessions of one project, and by those of one tree of sessions in several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChargedSum {
    /// The project.
    pub project_id: ProjectId,
    /// The other projects that are charged too.
    pub charged_above: Vec<ProjectId>,
    /// Input and output tokens.
    pub tokens: u64,
    /// The cost of what has a price.
    pub cost: UsdNanos,
}

impl Store {
    /// Appends records. Those that were appended before are not added again.
    pub async fn usage_append(&self, records: Vec<UsageRecord>) -> Result<()> {
        match records.is_empty() {
            true => Ok(()),
            false => self.write(AppendUsage(records)).await,
        }
    }

    /// What each of these sessions has used; those that used nothing are absent.
    pub async fn usage_of_sessions(&self, sessions: &[SessionId]) -> Result<HashMap<SessionId, UsageTotals>> {
        if sessions.is_empty() {
            return Ok(HashMap::new());
        }
        let mut query = QueryBuilder::new(
            "SELECT session_id, requests, input_tokens, output_tokens, cached_tokens, cost_nanos, estimated
             FROM session_usage WHERE session_id IN (",
        );
        for (number, session) in sessions.iter().enumerate() {
            query.push(if number == 0 { "" } else { ", " });
            query.push_bind(session.as_str());
        }
        query.push(")");
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        rows.iter()
            .map(|row| Ok((parsed(row, "session_id")?, totals_from_row(row)?)))
            .collect()
    }

    /// What was charged from one time to before another.
    pub async fn usage_charged(&self, from: Timestamp, before: Timestamp) -> Result<Vec<ChargedSum>> {
        let rows = query(
            "SELECT project_id, charged_above, CAST(SUM(input_tokens + output_tokens) AS BIGINT) AS tokens,
                    CAST(COALESCE(SUM(cost_nanos), 0) AS BIGINT) AS cost
             FROM usage WHERE ts >= $1 AND ts < $2 GROUP BY project_id, charged_above",
        )
        .bind(from.as_millisecond())
        .bind(before.as_millisecond())
        .fetch_all(self.readers())
        .await
        .map_err(read_error)?;
        let sum = |row: &DbRow| {
            let above = optional_text(row, "charged_above")?.unwrap_or_default();
            let above = above.split_whitespace().map(str::parse);
            Ok(ChargedSum {
                project_id: parsed(row, "project_id")?,
                charged_above: above.collect::<Result<_>>()?,
                tokens: number(row, "tokens")?,
                cost: UsdNanos(number(row, "cost")?),
            })
        };
        rows.iter().map(sum).collect()
    }
}

/// Reads the columns that [`UsageTotals`] has.
pub(super) fn totals_from_row(row: &DbRow) -> Result<UsageTotals> {
    let cost: Option<i64> = row.try_get("cost_nanos").map_err(read_error)?;
    Ok(UsageTotals {
        requests: number(row, "requests")?,
        input_tokens: number(row, "input_tokens")?,
        output_tokens: number(row, "output_tokens")?,
        cached_tokens: number(row, "cached_tokens")?,
        cost_usd: cost
            .map(|nanos| u64::try_from(nanos).map(UsdNanos))
            .transpose()
            .map_err(Error::internal)?,
        estimated: number::<i64>(row, "estimated")? != 0,
    })
}

struct AppendUsage(Vec<UsageRecord>);

impl StoreWrite for AppendUsage {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        for record in &self.0 {
            record.insert(tx).await?;
        }
        Ok(())
    }
}

impl UsageRecord {
    async fn insert(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let whole = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let totals = &self.totals;
        let cost = totals.cost_usd.map(|cost| whole(cost.0));
        let above = self.charged_above.iter().map(ProjectId::as_str);
        let above = (!self.charged_above.is_empty()).then(|| above.collect::<Vec<_>>().join(" "));
        let added = query(
            "INSERT INTO usage (usage_id, ts, session_id, project_id, charged_above, agent, token_id, model, requests,
                                input_tokens, output_tokens, cached_tokens, cost_nanos, estimated, tool_calls, turns,
                                model_turns)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)
             ON CONFLICT (usage_id) DO NOTHING",
        )
        .bind(&self.usage_id)
        .bind(self.ts.as_millisecond())
        .bind(self.session_id.as_str())
        .bind(self.project_id.as_str())
        .bind(above)
        .bind(self.agent.as_str())
        .bind(self.token_id.as_ref().map(TokenId::as_str))
        .bind(self.model.as_deref())
        .bind(whole(totals.requests))
        .bind(whole(totals.input_tokens))
        .bind(whole(totals.output_tokens))
        .bind(whole(totals.cached_tokens))
        .bind(cost)
        .bind(i64::from(totals.estimated))
        .bind(whole(self.tool_calls))
        .bind(whole(self.turns))
        .bind(whole(self.model_turns))
        .execute(&mut tx.db)
        .await?;
        if added.rows_affected() == 0 || totals.requests == 0 {
            return Ok(());
        }
        query(
            "INSERT INTO session_usage (session_id, requests, input_tokens, output_tokens, cached_tokens, cost_nanos,
                                        estimated)
             VALUES ($1, $2, $3, $4, $5, $6, $7)
             ON CONFLICT (session_id) DO UPDATE SET requests = session_usage.requests + $2,
                 input_tokens = session_usage.input_tokens + $3, output_tokens = session_usage.output_tokens + $4,
                 cached_tokens = session_usage.cached_tokens + $5,
                 cost_nanos = CASE WHEN $6 IS NULL THEN session_usage.cost_nanos
                                   ELSE COALESCE(session_usage.cost_nanos, 0) + $6 END,
                 estimated = CASE WHEN $7 > session_usage.estimated THEN $7 ELSE session_usage.estimated END",
        )
        .bind(self.session_id.as_str())
        .bind(whole(totals.requests))
        .bind(whole(totals.input_tokens))
        .bind(whole(totals.output_tokens))
        .bind(whole(totals.cached_tokens))
        .bind(cost)
        .bind(i64::from(totals.estimated))
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}
