//! `kill -9` in the middle of writing: whatever was acknowledged is there afterwards, without holes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
};

use common::delta;
use oubliette_protocol::{SessionId, debug::DebugBody};
use oubliette_store::{DebugFilter, Store};

const HOME: &str = "OUBLIETTE_KILL_TEST_DATABASE";

/// Not a test: the program that is killed. The test below runs it.
#[test]
#[ignore = "run by the test below, as a process of its own"]
fn child_appends_until_it_is_killed() {
    let Some(path) = std::env::var_os(HOME).map(PathBuf::from) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = Store::open(&path).await.unwrap();
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
                    say(&format!("event {session} {}", written.last().unwrap().index));
                    if round % 10 == 0 {
                        let body = DebugBody::RegistryCleared { tools: round };
                        store
                            .debugger()
                            .record_durable(Some(session.clone()), None, body)
                            .await
                            .unwrap();
                        say(&format!("debug {session} {round}"));
                    }
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

#[tokio::test]
async fn every_acknowledged_event_survives_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("oubliette.db");
    let mut acknowledged: HashMap<SessionId, i64> = HashMap::new();
    let mut recorded = 0;
    // Killed several times over, each time on top of what the last one left.
    for round in 1..=3 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "child_appends_until_it_is_killed",
                "--ignored",
                "--nocapture",
            ])
            .env(HOME, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut heard = 0;
        // After the kill, read on: what was said before it counts.
        for line in lines {
            let line = line.unwrap();
            // The test harness says its own things on the same line.
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
            heard += 1;
            if heard == 400 * round {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(heard >= 400 * round, "the child spoke: {heard}");
    }
    let store = Store::open(&path).await.unwrap();
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
    // And it goes on where it was.
    let session = acknowledged.keys().next().unwrap();
    let last = store.events().last_index(session).await.unwrap();
    assert_eq!(
        store.events().append(session, vec![delta("on")]).await.unwrap()[0].index,
        last + 1
    );
}
