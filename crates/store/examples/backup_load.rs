//! Measures how much a backup slows commits: durable appends by 50 sessions to a database of 1 GB, alone and while
//! `oubliette backup` reads it.
//!
//! `cargo run --release --example backup_load -- target/release/oubliette`; with `OUBLIETTE_STORE_URL` on that PostgreSQL
//! database, which is written to.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement for people"
)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use oubliette_protocol::{SessionId, event::EventBody};
use oubliette_store::{Store, StoreLocation, StoreOptions};

const SESSIONS: usize = 50;
const DATABASE_BYTES: usize = 1 << 30;
const EVENT_BYTES: usize = 600;
const ALONE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() {
    let program = std::env::args().nth(1).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let location = match std::env::var("OUBLIETTE_STORE_URL") {
        Ok(url) => StoreLocation::Postgres(url.parse().unwrap()),
        Err(_) => StoreLocation::File(dir.path().join("oubliette.db")),
    };
    let store = Store::open_at(&location, &StoreOptions::default()).await.unwrap();
    // Text that compresses about as well as what people and agents write.
    let text = |number: u64| {
        let words = (0..).map(|word| (number.wrapping_mul(2_654_435_761) >> (word % 32)) % 9973);
        let mut text = String::new();
        for word in words {
            text.push_str(&format!("word{word} "));
            if text.len() >= EVENT_BYTES {
                break;
            }
        }
        text
    };
    let session = SessionId::generate();
    for batch in 0..(DATABASE_BYTES / EVENT_BYTES / 1000) as u64 {
        let bodies = (0..1000).map(|n| EventBody::Delta {
            text: text(batch * 1000 + n),
        });
        store.events().append(&session, bodies.collect()).await.unwrap();
    }

    let (count, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut tasks = Vec::new();
    for _ in 0..SESSIONS {
        let (log, count, stop) = (store.events().clone(), count.clone(), stop.clone());
        tasks.push(tokio::spawn(async move {
            let session = SessionId::generate();
            while !stop.load(Ordering::Relaxed) {
                let body = EventBody::Delta {
                    text: "a piece of text as an agent streams it, ".repeat(3),
                };
                log.append(&session, vec![body]).await.unwrap();
                count.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    let measure = async |until: &mut (dyn Future<Output = ()> + Unpin)| {
        let (began, before) = (Instant::now(), count.load(Ordering::Relaxed));
        until.await;
        let took = began.elapsed();
        let rate = (count.load(Ordering::Relaxed) - before) as f64 / took.as_secs_f64();
        (rate, took)
    };
    let (alone, _) = measure(&mut Box::pin(tokio::time::sleep(ALONE))).await;
    println!("commits alone: {alone:.0} events/s");
    let file = dir.path().join("backup");
    let mut backup = tokio::process::Command::new(program)
        .args(["--home".as_ref(), dir.path().as_os_str()])
        .args(["backup".as_ref(), file.as_os_str()])
        .spawn()
        .unwrap();
    let (beside, took) = measure(&mut Box::pin(async {
        assert!(backup.wait().await.unwrap().success());
    }))
    .await;
    let size = std::fs::metadata(&file).unwrap().len() >> 20;
    println!(
        "commits beside a backup: {beside:.0} events/s, {:.0} %",
        100.0 * beside / alone
    );
    println!("backup: {took:.1?}, {size} MiB");
    let (after, _) = measure(&mut Box::pin(tokio::time::sleep(ALONE))).await;
    println!("commits afterwards: {after:.0} events/s");
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    store.close().await;
}
