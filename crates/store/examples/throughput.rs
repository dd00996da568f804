//! Measures the event log: durable appends by 50 sessions at once, a replay of 100,000 events, and the memory of
//! 1,000 idle followers.
//!
//! `cargo run --release -p oubliette-store --example throughput`; with `OUBLIETTE_STORE_URL` on that PostgreSQL database,
//! which is written to.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement for people"
)]

use std::time::{Duration, Instant};

use futures::StreamExt;
use oubliette_protocol::{SessionId, event::EventBody};
use oubliette_store::{Store, StoreLocation, StoreOptions};

const SESSIONS: usize = 50;
const REPLAYED: usize = 100_000;
const IDLE: usize = 1000;

#[tokio::main]
async fn main() {
    let dir = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let location = match std::env::var("OUBLIETTE_STORE_URL") {
        Ok(url) => StoreLocation::Postgres(url.parse().unwrap()),
        Err(_) => StoreLocation::File(dir.path().join("oubliette.db")),
    };
    let open = async || Store::open_at(&location, &StoreOptions::default()).await.unwrap();
    let store = open().await;
    println!("open a new database: {:?}", started.elapsed());
    let delta = || EventBody::Delta {
        text: "a piece of text as an agent streams it, ".repeat(3),
    };

    for (what, batch) in [("one at a time", 1), ("five at a time", 5)] {
        let started = Instant::now();
        let mut tasks = Vec::new();
        for _ in 0..SESSIONS {
            let log = store.events().clone();
            tasks.push(tokio::spawn(async move {
                let session = SessionId::generate();
                let mut appended = 0;
                while started.elapsed() < Duration::from_secs(3) {
                    log.append(&session, (0..batch).map(|_| delta()).collect())
                        .await
                        .unwrap();
                    appended += batch;
                }
                appended
            }));
        }
        let mut appended = 0;
        for task in tasks {
            appended += task.await.unwrap();
        }
        let rate = appended as f64 / started.elapsed().as_secs_f64();
        println!("append, {SESSIONS} sessions, {what}: {rate:.0} events/s");
    }

    let session = SessionId::generate();
    for _ in 0..REPLAYED / 1000 {
        store
            .events()
            .append(&session, (0..1000).map(|_| delta()).collect())
            .await
            .unwrap();
    }
    let started = Instant::now();
    let replayed = store.events().follow(&session, -1).take(REPLAYED).count().await;
    println!("replay of {replayed} events: {:?}", started.elapsed());

    let before = memory_kib();
    println!("memory: {before} KiB");
    let mut followers = Vec::new();
    for _ in 0..IDLE {
        let session = SessionId::generate();
        store.events().append(&session, vec![delta()]).await.unwrap();
        let mut follow = store.events().follow(&session, -1);
        followers.push(tokio::spawn(
            async move { while follow.next().await.is_some() {} },
        ));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    println!(
        "memory of {IDLE} sessions that are followed: {} KiB",
        memory_kib() - before
    );

    let started = Instant::now();
    store.close().await;
    println!("close: {:?}", started.elapsed());
    let started = Instant::now();
    let store = open().await;
    println!("open it again: {:?}", started.elapsed());
    store.close().await;
}

fn memory_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}
