//! What `oubliette approvals --watch` prints: finds out which approvals are new or were decided since the last look.

use std::collections::{BTreeMap, BTreeSet};

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::output::field_text;

/// How many approvals are asked for at once.
const PAGE: usize = 1_000;
/// The status of what waits for a decision.
const PENDING: &str = "pending";

/// The approvals that were seen.
pub(super) struct ApprovalWatch {
    /// Arguments of `approval_list`: which approvals are watched.
    filter: Value,
    /// The status of each by its id, so in the order they were requested. `None` before the first look.
    seen: Option<BTreeMap<String, String>>,
}

impl ApprovalWatch {
    /// Watches the approvals that `approval_list` lists for these arguments.
    pub(super) fn new(mut filter: Value) -> Self {
        filter["limit"] = json!(PAGE);
        Self { filter, seen: None }
    }

    /// The approvals that are new or have another status, oldest first; at the first look, those that wait. `list` answers
    /// `approval_list`. After an error the next look finds what this one would have found.
    pub(super) async fn poll(&mut self, list: impl AsyncFn(Value) -> Result<Value>) -> Result<Vec<Value>> {
        let (mut found, mut cursor) = self.read_page(&list, None, None).await?;
        if cursor.is_some() {
            // What waits may be older than a whole page of others.
            let mut after = None;
            loop {
                let (waiting, next) = self.read_page(&list, Some(PENDING), after).await?;
                found.extend(waiting);
                after = next;
                if after.is_none() {
                    break;
                }
            }
            // And so may be what waited at the last look and was decided since.
            let mut decided = self.missing(&found);
            while let (Some(oldest), Some(after)) = (decided.first().cloned(), cursor.take()) {
                let (mut older, next) = self.read_page(&list, None, Some(after)).await?;
                cursor = next.filter(|_| older.first_key_value().is_some_and(|(id, _)| *id > oldest));
                older.retain(|id, _| decided.remove(id));
                found.extend(older);
            }
        }
        let status = |row: &Value| field_text(row, "status");
        let now = found.iter().map(|(id, row)| (id.clone(), status(row))).collect();
        let before = self.seen.replace(now);
        let is_shown = |id: &String, row: &Value| match &before {
            Some(before) => before.get(id) != Some(&status(row)),
            None => status(row) == PENDING,
        };
        found.retain(|id, row| is_shown(id, row));
        Ok(found.into_values().collect())
    }

    /// Those that waited at the last look and are not among these.
    fn missing(&self, found: &BTreeMap<String, Value>) -> BTreeSet<String> {
        let seen = self.seen.iter().flatten();
        let waited = seen.filter(|(id, status)| *status == PENDING && !found.contains_key(*id));
        waited.map(|(id, _)| id.clone()).collect()
    }

    /// A page of approvals by id, and the cursor of the next.
    async fn read_page(
        &self,
        list: impl AsyncFn(Value) -> Result<Value>,
        status: Option<&str>,
        cursor: Option<String>,
    ) -> Result<(BTreeMap<String, Value>, Option<String>)> {
        let mut asked = self.filter.clone();
        if let Some(status) = status {
            asked["status"] = json!(status);
        }
        if let Some(cursor) = cursor {
            asked["cursor"] = json!(cursor);
        }
        let mut page = list(asked).await?;
        let Value::Array(rows) = page["approvals"].take() else {
            return Ok((BTreeMap::new(), None));
        };
        let rows = rows.into_iter().map(|row| (field_text(&row, "approval_id"), row));
        Ok((rows.collect(), page["next_cursor"].as_str().map(str::to_owned)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `approval_list` over these statuses, newest first; approval 7 is `appr_00007`.
    async fn listed(statuses: &[&str], asked: Value) -> Result<Value> {
        let id = |n: usize| format!("appr_{n:05}");
        let rows = statuses.iter().enumerate().rev();
        let rows = rows.filter(|(n, status)| {
            asked["status"].as_str().is_none_or(|wanted| wanted == **status)
                && asked["cursor"].as_str().is_none_or(|cursor| *id(*n) < *cursor)
        });
        let mut rows: Vec<Value> = rows
            .map(|(n, status)| json!({ "approval_id": id(n), "status": status }))
            .collect();
        let more = rows.len() > PAGE;
        rows.truncate(PAGE);
        let cursor = rows.last().filter(|_| more).map(|row| row["approval_id"].clone());
        Ok(json!({ "approvals": rows, "next_cursor": cursor }))
    }

    async fn changes(watch: &mut ApprovalWatch, statuses: &[&str]) -> Vec<String> {
        let changed = watch
            .poll(async |asked| listed(statuses, asked).await)
            .await
            .unwrap();
        let line = |row: &Value| format!("{} {}", field_text(row, "approval_id"), field_text(row, "status"));
        changed.iter().map(line).collect()
    }

    #[tokio::test]
    async fn what_waits_is_watched_however_many_wait_or_came_after_it() {
        let mut all = vec!["allowed", "pending", "pending"];
        all.extend(["denied"; 2_500]);
        all.extend(["pending"; 2_100]);
        let mut watch = ApprovalWatch::new(json!({}));
        let first = changes(&mut watch, &all).await;
        assert_eq!((first.len(), first[0].as_str()), (2_102, "appr_00001 pending"));
        assert!(first.is_sorted(), "oldest first");
        assert!(changes(&mut watch, &all).await.is_empty());
        // The oldest is decided, one in the middle, and a new one comes.
        (all[1], all[2_600]) = ("allowed", "cancelled");
        all.push("pending");
        let expected = ["appr_00001 allowed", "appr_02600 cancelled", "appr_04603 pending"];
        assert_eq!(changes(&mut watch, &all).await, expected);
        assert!(changes(&mut watch, &all).await.is_empty());
        all[2] = "expired";
        assert_eq!(changes(&mut watch, &all).await, ["appr_00002 expired"]);
    }

    #[tokio::test]
    async fn what_was_decided_between_two_looks_is_shown_and_a_failed_look_loses_nothing() {
        let mut watch = ApprovalWatch::new(json!({}));
        assert!(changes(&mut watch, &["allowed"]).await.is_empty());
        let failed = watch
            .poll(async |_| Err(oubliette_protocol::Error::unavailable("away")))
            .await;
        assert!(failed.is_err());
        let now = ["allowed", "denied", "pending"];
        let expected = ["appr_00001 denied", "appr_00002 pending"];
        assert_eq!(changes(&mut watch, &now).await, expected);
    }
}
