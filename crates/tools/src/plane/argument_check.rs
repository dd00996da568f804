//! The checks of a call's arguments: against the schema that a caller declared, and by the rules that look at them.

use std::sync::Arc;

use oubliette_os::WorkerThreads;
use oubliette_protocol::{
    Error, JsonObject, Result,
    argument_schema::{CHECK_STACK_BYTES, CheckEffort},
    tool::ToolRule,
};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::gate::FoundLentTool;
use crate::call_rules::{ArgumentRules, CallJudgement};

/// Threads that check large arguments, for all sessions.
static THREADS: WorkerThreads = WorkerThreads::new(2, CHECK_STACK_BYTES);

/// Arguments with more values than this, or more bytes of text, are large.
const LARGE_ARGUMENTS: usize = 16 * 1024;

/// Checks arguments and returns a copy of them for the caller. Nearly all are checked here and now. Large ones are
/// copied and checked on another thread, one at a time for each session, so that no call keeps this thread from serving
/// others.
pub(super) async fn check_arguments(
    lent: &FoundLentTool,
    arguments: &JsonObject,
    large_checks: &Semaphore,
) -> Result<Value> {
    if !is_large(arguments) {
        let copy = Value::Object(arguments.clone());
        if let Some(checked) = lent.tool().check_small_arguments(&copy) {
            return checked.map(|()| copy);
        }
    }
    let _turn = large_checks.acquire().await.map_err(Error::internal)?;
    let (lent, copy) = (lent.clone(), Value::Object(arguments.clone()));
    let check = move || lent.tool().check_arguments(&copy).map(|()| copy);
    THREADS.run(check).await.map_err(Error::internal)?
}

/// Judges a call by its arguments, and gives them back. Nearly all are judged here and now, large ones as
/// [`check_arguments`] does.
pub(crate) async fn judge_arguments(
    rules: Arc<ArgumentRules>,
    arguments: JsonObject,
    large_checks: &Semaphore,
) -> Result<(CallJudgement, JsonObject)> {
    let large = is_large(&arguments);
    let arguments = Value::Object(arguments);
    if !large && let Some(judgement) = rules.judge(&arguments, CheckEffort::Small) {
        return Ok((judgement, into_object(arguments)));
    }
    let _turn = large_checks.acquire().await.map_err(Error::internal)?;
    let judge = move || (judge_fully(&rules, &arguments), arguments);
    let (judgement, arguments) = THREADS.run(judge).await.map_err(Error::internal)?;
    Ok((judgement, into_object(arguments)))
}

/// Judges a call of whatever size. Takes up to [`CHECK_STACK_BYTES`] of stack.
fn judge_fully(rules: &ArgumentRules, arguments: &Value) -> CallJudgement {
    rules
        .judge(arguments, CheckEffort::Full)
        .unwrap_or(CallJudgement::Blocked(ToolRule::NoConditionHolds))
}

fn into_object(value: Value) -> JsonObject {
    match value {
        Value::Object(object) => object,
        _ => JsonObject::new(),
    }
}

/// Whether arguments are large, found by looking at no more than that much of them.
fn is_large(arguments: &JsonObject) -> bool {
    fn spend(value: &Value, left: &mut usize) -> bool {
        let own = match value {
            Value::String(text) => 1 + text.len(),
            _ => 1,
        };
        *left = left.saturating_sub(own);
        *left > 0
            && match value {
                Value::Array(items) => items.iter().all(|item| spend(item, left)),
                Value::Object(members) => members.iter().all(|(_, member)| spend(member, left)),
                _ => true,
            }
    }
    let mut left = LARGE_ARGUMENTS;
    !arguments.values().all(|argument| spend(argument, &mut left))
}
