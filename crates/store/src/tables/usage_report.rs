//! Sums of what was used, grouped by what it was used for.

use jiff::{Timestamp, civil::Date, tz::TimeZone};
use oubliette_protocol::{Error, ProjectId, Result, SessionId, usage::UsageTotals};

use super::{row::number, usage::totals_from_row};
use crate::{
    db::{DbRow, QueryBuilder},
    db_error::read_error,
    store::Store,
};

const DAY_MILLIS: i64 = 24 * 60 * 60 * 1000;
/// The key of what the home's owner used, who has no token.
const OWNER: &str = "owner";

/// What a report has a row for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsageGroup {
    /// Each project; the key is its id.
    Project,
    /// Each session; the key is its id.
    Session,
    /// Each agent; the key is its slug.
    Agent,
    /// Each model; the key is `provider/model`. A turn counts for each model that answered in it, a tool call for the one
    /// that answered last before it. What no model did is in no row.
    Model,
    /// Each token that started sessions; the key is its id, or `owner`.
    Token,
    /// Each day in UTC; the key is `YYYY-MM-DD`.
    Day,
}

impl UsageGroup {
    fn column(self) -> &'static str {
        match self {
            UsageGroup::Project => "project_id",
            UsageGroup::Session => "session_id",
            UsageGroup::Agent => "agent",
            UsageGroup::Model => "model",
            UsageGroup::Token => "COALESCE(token_id, 'owner')",
            UsageGroup::Day => "ts / 86400000",
        }
    }

    /// The sum that says in how many turns something of a group was used.
    fn turns_column(self) -> &'static str {
        match self {
            UsageGroup::Model => "model_turns",
            UsageGroup::Project
            | UsageGroup::Session
            | UsageGroup::Agent
            | UsageGroup::Token
            | UsageGroup::Day => "turns",
        }
    }
}

/// Selects what is summed. Absent fields match all.
#[derive(Debug, Clone, Default)]
pub struct UsageFilter {
    /// Of this project.
    pub project: Option<ProjectId>,
    /// Of this session.
    pub session: Option<SessionId>,
    /// From this time on.
    pub since: Option<Timestamp>,
    /// Before this time.
    pub until: Option<Timestamp>,
}

/// A sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageSum {
    /// Requests, tokens and cost.
    pub totals: UsageTotals,
    /// Tool calls.
    pub tool_calls: u64,
    /// Turns.
    pub turns: u64,
}

/// Sums by group, and of all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageReport {
    /// The groups that used most tokens; days are in order.
    pub rows: Vec<(String, UsageSum)>,
    /// Everything selected, whether or not it is in a row.
    pub total: UsageSum,
}

/// The sums are cast because PostgreSQL's sum of whole numbers is a decimal number.
const SUMS: &str = "CAST(COALESCE(SUM(requests), 0) AS BIGINT) AS requests,
    CAST(COALESCE(SUM(input_tokens), 0) AS BIGINT) AS input_tokens,
    CAST(COALESCE(SUM(output_tokens), 0) AS BIGINT) AS output_tokens,
    CAST(COALESCE(SUM(cached_tokens), 0) AS BIGINT) AS cached_tokens,
    CAST(SUM(cost_nanos) AS BIGINT) AS cost_nanos, COALESCE(MAX(estimated), 0) AS estimated,
    CAST(COALESCE(SUM(tool_calls), 0) AS BIGINT) AS tool_calls,
    CAST(COALESCE(SUM(turns), 0) AS BIGINT) AS turns,
    CAST(COALESCE(SUM(model_turns), 0) AS BIGINT) AS model_turns FROM usage WHERE 1 = 1";

impl Store {
    /// Sums what the filter selects; at most `max_rows` groups.
    pub async fn usage_report(
        &self,
        filter: &UsageFilter,
        group: UsageGroup,
        max_rows: u32,
    ) -> Result<UsageReport> {
        let mut query = QueryBuilder::new("SELECT ");
        query.push(SUMS);
        filter.push(&mut query);
        let total = query
            .build()
            .fetch_one(self.readers())
            .await
            .map_err(read_error)?;

        let column = group.column();
        let mut query = QueryBuilder::new("SELECT ");
        query.push(column).push(" AS group_key, ").push(SUMS);
        filter.push(&mut query);
        if group == UsageGroup::Model {
            query.push(" AND model IS NOT NULL");
        }
        query.push(" GROUP BY ").push(column).push(" ORDER BY ");
        query.push(match group {
            UsageGroup::Day => "group_key DESC",
            _ => "SUM(input_tokens + output_tokens) DESC, group_key",
        });
        query.push(" LIMIT ").push_bind(i64::from(max_rows));
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        let mut rows = rows
            .iter()
            .map(|row| {
                Ok((
                    key_from_row(row, group)?,
                    sum_from_row(row, group.turns_column())?,
                ))
            })
            .collect::<Result<Vec<_>>>()?;
        if group == UsageGroup::Day {
            rows.reverse();
        }
        Ok(UsageReport {
            rows,
            total: sum_from_row(&total, "turns")?,
        })
    }
}

impl UsageFilter {
    fn push(&self, query: &mut QueryBuilder<'_>) {
        if let Some(project) = &self.project {
            query
                .push(" AND project_id = ")
                .push_bind(project.as_str().to_owned());
        }
        if let Some(session) = &self.session {
            query
                .push(" AND session_id = ")
                .push_bind(session.as_str().to_owned());
        }
        // Times are stored in whole milliseconds; a later moment within one is after it.
        let millis = |at: Timestamp| {
            let floor = at.as_millisecond();
            let is_whole = Timestamp::from_millisecond(floor).is_ok_and(|whole| whole == at);
            if is_whole || at < Timestamp::UNIX_EPOCH {
                floor
            } else {
                floor + 1
            }
        };
        if let Some(since) = self.since {
            query.push(" AND ts >= ").push_bind(millis(since));
        }
        if let Some(until) = self.until {
            query.push(" AND ts < ").push_bind(millis(until));
        }
    }
}

fn key_from_row(row: &DbRow, group: UsageGroup) -> Result<String> {
    match group {
        UsageGroup::Day => {
            let day: i64 = row.try_get("group_key").map_err(read_error)?;
            let start = Timestamp::from_millisecond(day * DAY_MILLIS).map_err(Error::internal)?;
            let date: Date = start.to_zoned(TimeZone::UTC).date();
            Ok(date.to_string())
        }
        UsageGroup::Token => {
            let key: Option<String> = row.try_get("group_key").map_err(read_error)?;
            Ok(key.unwrap_or_else(|| OWNER.to_owned()))
        }
        UsageGroup::Project | UsageGroup::Session | UsageGroup::Agent | UsageGroup::Model => {
            row.try_get("group_key").map_err(read_error)
        }
    }
}

fn sum_from_row(row: &DbRow, turns: &str) -> Result<UsageSum> {
    Ok(UsageSum {
        totals: totals_from_row(row)?,
        tool_calls: number(row, "tool_calls")?,
        turns: number(row, turns)?,
    })
}
