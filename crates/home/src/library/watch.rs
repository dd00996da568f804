//! Noticing edits made directly to the files: by file system events where the host supports them, by polling
//! where it does not.

use std::{
    path::PathBuf,
    sync::{
        Arc, Weak,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant},
};

use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode},
};

use super::DefinitionLibrary;

/// An editor writes a file in several steps; events closer together than this are handled as one edit.
const DEBOUNCE: Duration = Duration::from_millis(80);
/// Maximum delay of an edit, even if further events keep coming.
const MAX_DEBOUNCE: Duration = Duration::from_millis(400);
/// Polling interval where there are no events: an edit is noticed within a second.
const POLL_INTERVAL: Duration = Duration::from_millis(600);
/// Polling interval where there are events: some file systems (network ones) do not report every change.
const RESCAN_INTERVAL: Duration = Duration::from_secs(20);

/// Sent to the watching thread.
enum WatchSignal {
    Edit,
    Stop,
}

/// Ends the watching thread when dropped.
#[derive(Debug)]
pub(super) struct WatchGuard(Sender<WatchSignal>);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        let _ = self.0.send(WatchSignal::Stop);
    }
}

/// Starts the watching thread. Never fails: without events it polls.
pub(super) fn start(library: &Arc<DefinitionLibrary>, dirs: [PathBuf; 2]) -> WatchGuard {
    let (signals, received) = channel();
    let watcher = watch_dirs(&signals, &dirs).inspect_err(|error| {
        tracing::warn!(%error, "watching definitions for file system events failed; polling them every {POLL_INTERVAL:?}");
    });
    let library = Arc::downgrade(library);
    let body = move || run_watch_loop(&library, &received, watcher.ok());
    if let Err(error) = std::thread::Builder::new()
        .name("oubliette-home".into())
        .spawn(body)
    {
        tracing::error!(%error, "starting the thread that watches definitions failed; edits to their files are seen at the next start");
    }
    WatchGuard(signals)
}

fn watch_dirs(signals: &Sender<WatchSignal>, dirs: &[PathBuf]) -> notify::Result<RecommendedWatcher> {
    let signals = signals.clone();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        if event.map_or(true, |event| is_edit(&event.kind)) {
            let _ = signals.send(WatchSignal::Edit);
        }
    })?;
    for dir in dirs {
        watcher.watch(dir, RecursiveMode::Recursive)?;
    }
    Ok(watcher)
}

/// Whether an event may be an edit. Reads are not: otherwise each scan of the files would cause the next.
fn is_edit(kind: &EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}

fn run_watch_loop(
    library: &Weak<DefinitionLibrary>,
    received: &Receiver<WatchSignal>,
    watcher: Option<RecommendedWatcher>,
) {
    let interval = if watcher.is_some() {
        RESCAN_INTERVAL
    } else {
        POLL_INTERVAL
    };
    loop {
        match received.recv_timeout(interval) {
            Ok(WatchSignal::Edit) => {
                let latest = Instant::now() + MAX_DEBOUNCE;
                loop {
                    let left = latest.saturating_duration_since(Instant::now());
                    match received.recv_timeout(DEBOUNCE.min(left)) {
                        Ok(WatchSignal::Edit) if !left.is_zero() => {}
                        Ok(WatchSignal::Edit) | Err(RecvTimeoutError::Timeout) => break,
                        Ok(WatchSignal::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(WatchSignal::Stop) | Err(RecvTimeoutError::Disconnected) => return,
        }
        match library.upgrade() {
            Some(library) => library.reload(),
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HomeDir;

    #[test]
    fn reading_is_not_an_edit() {
        use notify::event::{CreateKind, ModifyKind, RemoveKind};
        assert!(!is_edit(&EventKind::Access(AccessKind::Open(AccessMode::Any))));
        assert!(!is_edit(&EventKind::Access(AccessKind::Close(AccessMode::Read))));
        assert!(is_edit(&EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(is_edit(&EventKind::Create(CreateKind::File)));
        assert!(is_edit(&EventKind::Modify(ModifyKind::Any)));
        assert!(is_edit(&EventKind::Remove(RemoveKind::Folder)));
    }

    #[tokio::test]
    async fn without_events_edits_are_found_by_polling() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path()).unwrap();
        let library = DefinitionLibrary::open(&home).unwrap();
        // As on a host that supports no events.
        *library.watcher.lock() = None;
        let (_signals, received) = channel();
        let weak = Arc::downgrade(&library);
        let polling = std::thread::spawn(move || run_watch_loop(&weak, &received, None));
        let mut changes = library.changes();
        changes.mark_unchanged();
        std::fs::create_dir(home.agents_dir().join("a")).unwrap();
        std::fs::write(
            home.agents_dir().join("a/agent.json"),
            r#"{"name":"A","prompt":"p"}"#,
        )
        .unwrap();
        while library.agents().is_empty() {
            changes.changed().await.unwrap();
        }
        drop((library, changes));
        polling.join().unwrap();
    }
}
