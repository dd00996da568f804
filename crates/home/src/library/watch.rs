//! Hand edits, seen as they happen: file system events where the host gives them, looking now and then
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

use super::Library;

/// An editor writes a file in several steps; what follows within this time is taken together.
const QUIET: Duration = Duration::from_millis(80);
/// But an edit is seen after this time even if the folder never gets quiet.
const LATEST: Duration = Duration::from_millis(400);
/// Without events, how often to look: an edit is seen within a second.
const POLL: Duration = Duration::from_millis(600);
/// With events, how often to look all the same: some file systems (network ones) do not tell of all.
const SAFETY: Duration = Duration::from_secs(20);

enum Wake {
    Edit,
    Stop,
}

/// Ends the watching when it is dropped.
#[derive(Debug)]
pub(super) struct Stop(Sender<Wake>);

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = self.0.send(Wake::Stop);
    }
}

/// Begins to watch; never fails, at worst it looks now and then.
pub(super) fn start(library: &Arc<Library>, dirs: [PathBuf; 2]) -> Stop {
    let (tell, told) = channel();
    let watcher = watch(&tell, &dirs).inspect_err(|error| {
        tracing::warn!(%error, "the file system gives no events here; definitions are looked at every {POLL:?}");
    });
    let library = Arc::downgrade(library);
    let body = move || follow(&library, &told, watcher.ok());
    if let Err(error) = std::thread::Builder::new()
        .name("oubliette-home".into())
        .spawn(body)
    {
        tracing::error!(%error, "no thread to watch definitions: hand edits are seen at the next start");
    }
    Stop(tell)
}

fn watch(tell: &Sender<Wake>, dirs: &[PathBuf]) -> notify::Result<RecommendedWatcher> {
    let tell = tell.clone();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        if event.map_or(true, |event| matters(&event.kind)) {
            let _ = tell.send(Wake::Edit);
        }
    })?;
    for dir in dirs {
        watcher.watch(dir, RecursiveMode::Recursive)?;
    }
    Ok(watcher)
}

/// Reading is no edit; without this, each look at the files would cause the next one.
fn matters(kind: &EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}

fn follow(library: &Weak<Library>, told: &Receiver<Wake>, watcher: Option<RecommendedWatcher>) {
    let rest = if watcher.is_some() { SAFETY } else { POLL };
    loop {
        match told.recv_timeout(rest) {
            Ok(Wake::Edit) => {
                let latest = Instant::now() + LATEST;
                loop {
                    let left = latest.saturating_duration_since(Instant::now());
                    match told.recv_timeout(QUIET.min(left)) {
                        Ok(Wake::Edit) if !left.is_zero() => {}
                        Ok(Wake::Edit) | Err(RecvTimeoutError::Timeout) => break,
                        Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected) => return,
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
    use crate::Home;

    #[test]
    fn reading_is_no_edit() {
        use notify::event::{CreateKind, ModifyKind, RemoveKind};
        assert!(!matters(&EventKind::Access(AccessKind::Open(AccessMode::Any))));
        assert!(!matters(&EventKind::Access(AccessKind::Close(AccessMode::Read))));
        assert!(matters(&EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(matters(&EventKind::Create(CreateKind::File)));
        assert!(matters(&EventKind::Modify(ModifyKind::Any)));
        assert!(matters(&EventKind::Remove(RemoveKind::Folder)));
    }

    #[tokio::test]
    async fn without_events_edits_are_seen_by_looking() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path()).unwrap();
        let library = Library::open(&home).unwrap();
        // As on a host that gives no events.
        *library.watcher.lock() = None;
        let (_tell, told) = channel();
        let weak = Arc::downgrade(&library);
        let looking = std::thread::spawn(move || follow(&weak, &told, None));
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
        looking.join().unwrap();
    }
}
