//! `kill -9` in the middle of writing: every acknowledged event is there afterwards, without gaps.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

use common::{delta, postgres};
use oubliette_protocol::{SessionId, debug::DebugBody};
use oubliette_store::{DebugFilter, StoreLocation};

const DATABASE_VAR: &str = "OUBLIETTE_KILL_TEST_DATABASE";

/// Not a test: the process that is killed. The test below runs it.
#[test]
#[ignore = "run by the test below, as a process of its own"]
fn child_appends_until_it_is_killed() {
    let Ok(database) = std::env::var(DATABASE_VAR) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = common::open(&location(&database)).await;
        let mut tasks = Vec::new();
        for _ in 0..8 {
            let store = store.clone();
            tasks.push(tokio::spawn(async move {
                let session = SessionId::generate();
                for round in 0.. {
                    let bodies = (0..round % 7 + 1)
                        .map(|i| delta(format!("{round}.{i}")))
                        .collect();
                    let written = store.events().append(&session, bodies).await.unwrap();
                    print_line(&format!("event {session} {}", written.last().unwrap().index));
                    if round % 10 == 0 {
                        let body = DebugBody::RegistryCleared { tools: round };
                        store
                            .debugger()
                            .record_durable(Some(session.clone()), None, body)
                            .await
                            .unwrap();
                        print_line(&format!("debug {session} {round}"));
                    }
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
}

fn location(database: &str) -> StoreLocation {
    match database.starts_with("postgres:") {
        true => StoreLocation::Postgres(database.parse().unwrap()),
        false => StoreLocation::File(database.into()),
    }
}

fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

#[tokio::test]
async fn every_acknowledged_event_survives_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let database = match postgres::is_selected() {
        true => postgres::url_text(&postgres::new_schema().await),
        false => dir.path().join("oubliette.db").display().to_string(),
    };
    let mut acknowledged: HashMap<SessionId, i64> = HashMap::new();
    let mut recorded = 0;
    // Killed several times, each time continuing with the database of the last run.
    for round in 1..=3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "child_appends_until_it_is_killed",
                "--ignored",
                "--nocapture",
            ])
            .env(DATABASE_VAR, &database)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut acks = 0;
        // Reads on after the kill: what was acknowledged before it counts.
        for line in lines {
            let line = line.unwrap();
            // The test harness prints its own text on the same line.
            let words: Vec<&str> = line.split_whitespace().collect();
            let Some(at) = words.iter().position(|w| matches!(*w, "event" | "debug")) else {
                continue;
            };
            let [kind, session, index] = words[at..] else {
                continue;
            };
            let Ok(session) = session.parse::<SessionId>() else {
                continue;
            };
            match kind {
                "event" => {
                    let index: i64 = index.parse().unwrap();
                    let last = acknowledged.entry(session).or_insert(-1);
                    assert!(index > *last);
                    *last = index;
                }
                _ => recorded += 1,
            }
            acks += 1;
            if acks == 400 * round {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(acks >= 400 * round, "the child spoke: {acks}");
    }
    let store = common::open(&location(&database)).await;
    for (session, last) in &acknowledged {
        let events = store.events().read(session, -1, 1_000_000).await.unwrap();
        assert!(
            events.len() as i64 > *last,
            "{session}: {} of {last}",
            events.len()
        );
        assert!(
            events
                .iter()
                .enumerate()
                .all(|(i, event)| event.index == i as i64),
            "holes in {session}"
        );
    }
    let debug = store
        .debugger()
        .read(&DebugFilter::default(), -1, 1_000_000)
        .await
        .unwrap();
    assert!(debug.len() >= recorded);
    assert!(debug.iter().enumerate().all(|(i, event)| event.index == i as i64));
    // Appending continues at the next index.
    let session = acknowledged.keys().next().unwrap();
    let last = store.events().last_index(session).await.unwrap();
    assert_eq!(
        store.events().append(session, vec![delta("on")]).await.unwrap()[0].index,
        last + 1
    );
}
