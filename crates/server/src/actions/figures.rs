//! `figures_report`: how many calls there were, how long they took and how many failed, over time and by tool, agent, project
//! and model. Computed from the debugger's log, which is durable, so that a restart of the server leaves no gap.

use std::{collections::HashMap, time::Duration};

use jiff::Timestamp;
use oubliette_protocol::{
    Error, ProjectId, Result, Scope, SessionId, Slug,
    debug::{DebugBody, DebugEvent},
};
use oubliette_store::{DebugFilter, DebugLog};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::{ActionCall, ActionHandler, Effect};

/// The longest range, in minutes: 30 days.
const MAX_MINUTES: u32 = 30 * 24 * 60;
/// Maximum number of indexes of the log that one report reads, the newest of its range.
const MAX_INDEXES: i64 = 200_000;
/// How many events are read at once.
const CHUNK_EVENTS: usize = 1_000;
/// Maximum number of points on the time axis.
const MAX_POINTS: i64 = 72;
/// Lengths that a point on the time axis may have, in seconds.
const POINT_SECONDS: [i64; 10] = [15, 60, 300, 600, 1_800, 3_600, 10_800, 21_600, 43_200, 86_400];
/// Maximum number of rows of each table.
const MAX_ROWS: usize = 50;
/// Reports that are computed at once; others wait.
static REPORTS: Semaphore = Semaphore::const_new(2);
/// How long one report may take.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);

/// `figures_report`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FiguresReport {
    /// How far back to look, in minutes, 1 to 43200 (30 days). Default: 60.
    #[serde(default)]
    pub minutes: Option<u32>,
    /// Only calls of this project's sessions (`proj_…`). Absent: of all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Only calls of the agent with this slug. Absent: of all.
    #[serde(default)]
    pub agent: Option<Slug>,
}

/// Result of `figures_report`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FiguresResult {
    /// Where the range begins.
    since: Timestamp,
    /// Where it ends.
    until: Timestamp,
    /// From when on everything is counted: later than `since` when there were more events than one report reads.
    covered_since: Timestamp,
    /// Length of a point on the time axis, in milliseconds.
    step_ms: i64,
    /// The whole range.
    total: FiguresSummary,
    /// The points of the time axis, oldest first.
    points: Vec<FiguresPoint>,
    /// The tools with most calls, at most 50.
    tools: Vec<FiguresRow>,
    /// The agents with most calls, by slug, at most 50.
    agents: Vec<FiguresRow>,
    /// The projects with most calls, by id, at most 50.
    projects: Vec<FiguresRow>,
    /// The models with most requests, at most 50.
    models: Vec<FiguresRow>,
}

/// Counts and percentiles.
#[derive(Debug, Serialize, JsonSchema)]
struct FiguresSummary {
    /// Tool calls.
    calls: u64,
    /// Tool calls that failed.
    errors: u64,
    /// Tool calls that the agent's rules blocked.
    blocked: u64,
    /// Model requests.
    model_requests: u64,
    /// Model requests that failed.
    model_errors: u64,
    /// Duration that half of the calls were within, in milliseconds; of a model, of its requests. Null without any.
    p50_ms: Option<f32>,
    /// The same for 95 of 100.
    p95_ms: Option<f32>,
    /// The same for 99 of 100.
    p99_ms: Option<f32>,
}

/// A point on the time axis.
#[derive(Debug, Serialize, JsonSchema)]
struct FiguresPoint {
    #[serde(flatten)]
    figures: FiguresSummary,
    /// When it begins.
    at: Timestamp,
}

/// The figures of one tool, agent, project or model.
#[derive(Debug, Serialize, JsonSchema)]
struct FiguresRow {
    #[serde(flatten)]
    figures: FiguresSummary,
    /// The tool's canonical name, the agent's slug, the project's id or the model as `provider/model`; cut to 200 characters.
    key: String,
}

impl ActionHandler for FiguresReport {
    type Output = FiguresResult;

    const NAME: &'static str = "figures_report";
    const DESCRIPTION: &'static str = "Count tool calls, failures, blocked calls and model requests over time, with percentiles of their \
        duration, and by tool, agent, project and model. covered_since is later than since when there were more events than one \
        report reads.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let minutes = self.minutes.unwrap_or(60);
        if !(1..=MAX_MINUTES).contains(&minutes) {
            return Err(Error::invalid(format!("minutes must be 1 to {MAX_MINUTES}")));
        }
        if let Some(id) = &self.project_id {
            call.project(id).await?;
        }
        let filter = DebugFilter {
            agent: self.agent,
            project: self.project_id.or_else(|| call.grant.project().cloned()),
            ..DebugFilter::default()
        };
        let _turn = REPORTS.acquire().await.map_err(Error::internal)?;
        let report = tokio::time::timeout(REPORT_TIMEOUT, compute(call, filter, minutes));
        tokio::select! {
            report = report => report.map_err(|_| Error::limit_exceeded("the report took too long; choose a shorter range"))?,
            error = call.abandoned() => Err(error),
        }
    }
}

async fn compute(call: &ActionCall<'_>, filter: DebugFilter, minutes: u32) -> Result<FiguresResult> {
    let log = call.app.store.debugger();
    log.flush().await;
    let until = oubliette_protocol::now().as_millisecond();
    let axis = TimeAxis::new(until, i64::from(minutes) * 60_000);
    let last = log.last_index().await?;
    let first = last_before(log, axis.since, last).await?;
    let start = first.max(last - MAX_INDEXES);
    let kinds = ["tool_call", "tool_blocked", "model_request"];
    let wanted = DebugFilter {
        kinds: Some(kinds.map(str::to_owned).to_vec()),
        ..filter
    };
    let mut figures = FiguresCollector::new(axis.points());
    let mut projects = ProjectNames::default();
    let mut at = start;
    let mut covered = None;
    loop {
        let events = log.read(&wanted, at, CHUNK_EVENTS).await?;
        let Some(newest) = events.last() else { break };
        at = newest.index;
        for event in &events {
            covered.get_or_insert(event.ts);
            let project = projects.of(call, event.session_id.as_ref()).await?;
            figures.add(event, axis.point(event.ts), project.as_ref());
        }
        if at >= last {
            break;
        }
    }
    let since = millis(axis.since)?;
    let covered = if start > first {
        covered.unwrap_or(since).max(since)
    } else {
        since
    };
    let points = figures
        .points
        .iter_mut()
        .zip(0_i64..)
        .map(|(counts, place)| {
            let at = millis(axis.since + place * axis.step)?;
            Ok(FiguresPoint {
                figures: counts.summary(),
                at,
            })
        })
        .collect::<Result<_>>()?;
    Ok(FiguresResult {
        since,
        until: millis(until)?,
        covered_since: covered,
        step_ms: axis.step,
        total: figures.total.summary(),
        points,
        tools: rows(figures.tools),
        agents: rows(figures.agents),
        projects: rows(figures.projects),
        models: rows(figures.models),
    })
}

fn millis(at: i64) -> Result<Timestamp> {
    Timestamp::from_millisecond(at).map_err(Error::internal)
}

/// The range of a report, cut into points of a round length.
struct TimeAxis {
    /// In milliseconds since the epoch, like `until`.
    since: i64,
    until: i64,
    /// Length of a point, in milliseconds.
    step: i64,
}

impl TimeAxis {
    fn new(until: i64, length: i64) -> Self {
        let fits = |seconds: &i64| length / (seconds * 1000) < MAX_POINTS;
        let step = POINT_SECONDS.into_iter().find(fits).unwrap_or(86_400) * 1000;
        // Points begin at round times, so that a report a moment later has the same ones.
        let since = (until - length).div_euclid(step) * step;
        Self { since, until, step }
    }

    fn points(&self) -> usize {
        usize::try_from((self.until - self.since) / self.step + 1).unwrap_or(1)
    }

    /// The point an event belongs to; none when it is outside the range.
    fn point(&self, at: Timestamp) -> Option<usize> {
        let place = (at.as_millisecond() - self.since).div_euclid(self.step);
        usize::try_from(place).ok().filter(|place| *place < self.points())
    }
}

/// The last index whose event is before a time, by halving: times are in the order of indexes.
async fn last_before(log: &DebugLog, at: i64, last: i64) -> Result<i64> {
    let any = DebugFilter::default();
    let (mut before, mut upto) = (-1, last);
    while before < upto {
        let middle = before + (upto - before) / 2;
        match log.read(&any, middle, 1).await?.first() {
            Some(event) if event.ts.as_millisecond() < at => before = event.index,
            _ => upto = middle,
        }
    }
    Ok(before)
}

/// The projects of sessions, each looked up once.
#[derive(Default)]
struct ProjectNames(HashMap<SessionId, Option<ProjectId>>);

impl ProjectNames {
    async fn of(&mut self, call: &ActionCall<'_>, session: Option<&SessionId>) -> Result<Option<ProjectId>> {
        let Some(session) = session else { return Ok(None) };
        if let Some(known) = self.0.get(session) {
            return Ok(known.clone());
        }
        let project = call.app.store.session_project(session).await?;
        self.0.insert(session.clone(), project.clone());
        Ok(project)
    }
}

/// What is counted of one point, tool, agent, project or model.
#[derive(Debug, Default)]
struct EventCounts {
    calls: u64,
    errors: u64,
    blocked: u64,
    model_requests: u64,
    model_errors: u64,
    /// Durations of calls, in milliseconds; of a model, those of its requests.
    durations: Vec<f32>,
}

/// One event, as far as it is counted.
#[derive(Debug, Clone, Copy)]
enum CountedEvent {
    Call { ok: bool, took: f32 },
    Blocked,
    Model { ok: bool, took: f32 },
}

impl EventCounts {
    fn add(&mut self, counted: CountedEvent) {
        match counted {
            CountedEvent::Call { ok, took } => {
                self.calls += 1;
                self.errors += u64::from(!ok);
                self.durations.push(took);
            }
            CountedEvent::Blocked => self.blocked += 1,
            CountedEvent::Model { ok, .. } => {
                self.model_requests += 1;
                self.model_errors += u64::from(!ok);
            }
        }
    }

    /// Counts and percentiles. Sorts the durations.
    fn summary(&mut self) -> FiguresSummary {
        self.durations.sort_by(f32::total_cmp);
        let part = |share: usize| {
            let place = (self.durations.len() * share / 100).min(self.durations.len().saturating_sub(1));
            self.durations
                .get(place)
                .map(|took| (took * 1000.0).round() / 1000.0)
        };
        FiguresSummary {
            calls: self.calls,
            errors: self.errors,
            blocked: self.blocked,
            model_requests: self.model_requests,
            model_errors: self.model_errors,
            p50_ms: part(50),
            p95_ms: part(95),
            p99_ms: part(99),
        }
    }
}

/// Counts the events of a report.
struct FiguresCollector {
    total: EventCounts,
    points: Vec<EventCounts>,
    tools: HashMap<String, EventCounts>,
    agents: HashMap<String, EventCounts>,
    projects: HashMap<String, EventCounts>,
    models: HashMap<String, EventCounts>,
}

impl FiguresCollector {
    fn new(points: usize) -> Self {
        Self {
            total: EventCounts::default(),
            points: std::iter::repeat_with(EventCounts::default)
                .take(points)
                .collect(),
            tools: HashMap::new(),
            agents: HashMap::new(),
            projects: HashMap::new(),
            models: HashMap::new(),
        }
    }

    fn add(&mut self, event: &DebugEvent, point: Option<usize>, project: Option<&ProjectId>) {
        let Some(place) = point else { return };
        #[allow(
            clippy::cast_possible_truncation,
            reason = "a duration needs no more than seven digits"
        )]
        let (counted, tool) = match &event.body {
            DebugBody::ToolCall {
                canonical,
                ok,
                duration_ms,
                ..
            } => (
                CountedEvent::Call {
                    ok: *ok,
                    took: *duration_ms as f32,
                },
                Some(canonical),
            ),
            DebugBody::ToolBlocked { tool, canonical, .. } => {
                (CountedEvent::Blocked, Some(canonical.as_ref().unwrap_or(tool)))
            }
            DebugBody::ModelRequest {
                provider,
                status,
                duration_ms,
                usage,
                ..
            } => {
                let counted = CountedEvent::Model {
                    ok: *status < 400,
                    took: *duration_ms as f32,
                };
                let model = usage.as_ref().map_or(provider, |usage| &usage.model);
                add_to(&mut self.models, model, counted);
                if let (Some(counts), CountedEvent::Model { took, .. }) =
                    (self.models.get_mut(model.as_str()), counted)
                {
                    counts.durations.push(took);
                }
                (counted, None)
            }
            _ => return,
        };
        self.total.add(counted);
        if let Some(counts) = self.points.get_mut(place) {
            counts.add(counted);
        }
        if let Some(tool) = tool {
            add_to(&mut self.tools, tool, counted);
        }
        if let Some(agent) = &event.agent {
            add_to(&mut self.agents, agent.as_str(), counted);
        }
        if let Some(project) = project {
            add_to(&mut self.projects, project.as_str(), counted);
        }
    }
}

/// Maximum number of different keys that are counted by themselves: names of tools that do not exist are an agent's to make up.
const MAX_KEYS: usize = 5_000;
/// Maximum length of a key, in characters.
const MAX_KEY_CHARS: usize = 200;

fn add_to(groups: &mut HashMap<String, EventCounts>, key: &str, counted: CountedEvent) {
    let key: String = key.chars().take(MAX_KEY_CHARS).collect();
    if groups.len() < MAX_KEYS || groups.contains_key(&key) {
        groups.entry(key).or_default().add(counted);
    }
}

/// The rows of a table: those with most calls, requests and blocks.
fn rows(groups: HashMap<String, EventCounts>) -> Vec<FiguresRow> {
    let mut all: Vec<(String, EventCounts)> = groups.into_iter().collect();
    all.sort_by(|(a_key, a), (b_key, b)| {
        let weight = |counts: &EventCounts| counts.calls + counts.model_requests + counts.blocked;
        weight(b).cmp(&weight(a)).then_with(|| a_key.cmp(b_key))
    });
    all.into_iter()
        .take(MAX_ROWS)
        .map(|(key, mut counts)| FiguresRow {
            figures: counts.summary(),
            key,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_range_has_at_most_the_points_of_one_axis_and_holds_its_ends() {
        let until = 1_790_000_123_456;
        for minutes in [1, 15, 60, 360, 1_440, 10_080, MAX_MINUTES] {
            let length = i64::from(minutes) * 60_000;
            let axis = TimeAxis::new(until, length);
            assert!(
                axis.points() as i64 <= MAX_POINTS + 1,
                "{minutes}: {}",
                axis.points()
            );
            assert_eq!(
                axis.point(millis(until).unwrap()),
                Some(axis.points() - 1),
                "{minutes}"
            );
            assert!(axis.point(millis(until - length).unwrap()).is_some(), "{minutes}");
            assert_eq!(axis.point(millis(axis.since - 1).unwrap()), None, "{minutes}");
        }
    }

    #[test]
    fn percentiles_are_of_the_durations_and_absent_without_any() {
        let mut counts = EventCounts::default();
        assert_eq!(counts.summary().p50_ms, None);
        for took in (1..=100).rev() {
            counts.add(CountedEvent::Call {
                ok: took != 7,
                took: f32::from(i16::try_from(took).unwrap()),
            });
        }
        let figures = counts.summary();
        assert_eq!((figures.calls, figures.errors), (100, 1));
        assert_eq!(
            (figures.p50_ms, figures.p95_ms, figures.p99_ms),
            (Some(51.0), Some(96.0), Some(100.0))
        );
    }

    #[test]
    fn made_up_names_of_tools_do_not_fill_the_memory() {
        let mut groups = HashMap::new();
        for i in 0..MAX_KEYS + 10 {
            add_to(
                &mut groups,
                &format!("{i}{}", "x".repeat(10_000)),
                CountedEvent::Blocked,
            );
        }
        assert_eq!(groups.len(), MAX_KEYS);
        assert!(groups.keys().all(|key| key.chars().count() == MAX_KEY_CHARS));
        assert_eq!(rows(groups).len(), MAX_ROWS);
    }
}
