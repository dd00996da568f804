//! One group of writes, from begin to commit.
//!
//! A write that is refused is taken back alone (a savepoint), and the rest of its group stands. When the
//! transaction itself breaks (a full disk, say), it is gone with all that was in it; then each write is
//! tried once more alone, so that one that cannot be written does not take the others with it.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::{Error, ProjectId, SessionId, event::Event};
use parking_lot::Mutex;
use sqlx::{ConnectOptions, Row, SqliteConnection, sqlite::SqliteConnectOptions};

use super::{
    batch,
    job::{Counter, EventJob, Survives, Task, Touched, Tx},
    slot::{DebugPlace, Slot, fail, guarded},
};
use crate::{
    fault::Fault,
    log::{
        debugger::{DebugJob, Queue, Recorded},
        tail::Hub,
    },
    store::Remembered,
    tables::purge,
};

/// Sessions the writer remembers; past it, it forgets all and looks them up again.
const REMEMBERED: usize = 4096;

/// The writer's connection and what it knows.
pub(super) struct Writer {
    pub(super) tx: Tx,
    again: SqliteConnectOptions,
    pub(super) hub: Arc<Hub>,
    pub(super) queue: Arc<Queue>,
    remembered: Arc<Remembered>,
    fault: Arc<Mutex<Option<Error>>>,
    synced: Survives,
    /// Where each session's log goes on. True only while every commit succeeds.
    logs: HashMap<SessionId, Place>,
    projects: HashMap<SessionId, ProjectId>,
    /// Whether there may be something left of deleted projects.
    pub(super) purging: bool,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    log: i64,
    next: i64,
}

/// Where a group broke.
enum Break {
    /// Nothing was begun: trying the parts alone would only wait again.
    AtBegin(Error),
    /// Something in it broke it.
    Within(Error),
}

impl Writer {
    pub(super) fn new(
        db: SqliteConnection,
        again: SqliteConnectOptions,
        hub: Arc<Hub>,
        queue: Arc<Queue>,
        remembered: Arc<Remembered>,
        fault: Arc<Mutex<Option<Error>>>,
    ) -> Self {
        let tx = Tx {
            db,
            now: crate::now(),
            gone: Vec::new(),
            purge: false,
            touched: Touched::default(),
        };
        let (logs, projects) = Default::default();
        Self {
            tx,
            again,
            hub,
            queue,
            remembered,
            fault,
            synced: Survives::Crash,
            logs,
            projects,
            purging: true,
        }
    }

    /// Writes a group, then shows and answers it.
    pub(super) async fn commit(&mut self, tasks: impl Iterator<Item = Task>, debug: Vec<DebugJob>) {
        let tasks = tasks.filter_map(|task| match task {
            Task::Events(job) => Some(Slot::Events {
                job,
                events: Vec::new(),
                refused: None,
            }),
            Task::Work(job) => Some(Slot::Work { job, refused: None }),
            Task::Close => None,
        });
        let debug = debug.into_iter().map(|job| Slot::Debug {
            job: Box::new(job),
            place: None,
        });
        let mut slots: Vec<Slot> = tasks.chain(debug).collect();
        if slots.is_empty() {
            return;
        }
        match self.attempt(&mut slots).await {
            Ok(()) => self.finish(slots),
            Err(Break::Within(_)) if slots.len() > 1 => {
                for slot in slots {
                    let mut alone = vec![slot];
                    match self.attempt(&mut alone).await {
                        Ok(()) => self.finish(alone),
                        Err(Break::AtBegin(error) | Break::Within(error)) => fail(alone, &error),
                    }
                }
            }
            Err(Break::AtBegin(error) | Break::Within(error)) => fail(slots, &error),
        }
    }

    /// Takes away a piece of what deleted projects left behind.
    pub(super) async fn purge_some(&mut self) {
        let outcome = async {
            self.begin(Survives::Crash).await?;
            let more = purge::some(&mut self.tx).await?;
            sqlx::query("COMMIT").execute(&mut self.tx.db).await?;
            Ok::<bool, Fault>(more)
        };
        match outcome.await {
            Ok(more) => self.purging = more,
            Err(fault) => {
                self.broken(fault).await;
                // Tried again at the next deletion or start.
                self.purging = false;
            }
        }
    }

    async fn attempt(&mut self, slots: &mut [Slot]) -> Result<(), Break> {
        let survives = slots.iter().map(Slot::survives).max().unwrap_or(Survives::Crash);
        let applied = match self.is_one_statement(slots) {
            // A statement by itself is a transaction; begin and commit would only cost two more.
            true => match self.prepare(survives).await {
                Ok(()) => self.apply(slots).await,
                Err(fault) => return Err(Break::AtBegin(self.broken(fault).await)),
            },
            false => match self.begin(survives).await {
                Ok(()) => self.apply_all(slots).await,
                Err(fault) => return Err(Break::AtBegin(self.broken(fault).await)),
            },
        };
        match applied {
            Ok(()) => {
                let mut fault = self.fault.lock();
                if fault.take().is_some() {
                    tracing::info!("the database can be written again");
                }
                Ok(())
            }
            Err(fault) => Err(Break::Within(self.broken(fault).await)),
        }
    }

    /// Whether applying these is a single `INSERT`: events of logs whose place is known.
    fn is_one_statement(&self, slots: &[Slot]) -> bool {
        let mut rows = 0;
        let only_events = slots.iter().all(|slot| match slot {
            Slot::Events { job, .. } => {
                rows += job.bodies.len();
                job.patch.is_none() && self.logs.contains_key(&job.session)
            }
            Slot::Work { .. } | Slot::Debug { .. } => false,
        });
        // What the writer knows may be cleared before it begins.
        only_events && self.logs.len() <= REMEMBERED && batch::is_one(rows)
    }

    async fn begin(&mut self, survives: Survives) -> Result<(), Fault> {
        self.prepare(survives).await?;
        sqlx::query("BEGIN IMMEDIATE").execute(&mut self.tx.db).await?;
        Ok(())
    }

    async fn apply_all(&mut self, slots: &mut [Slot]) -> Result<(), Fault> {
        self.apply(slots).await?;
        sqlx::query("COMMIT").execute(&mut self.tx.db).await?;
        Ok(())
    }

    async fn prepare(&mut self, survives: Survives) -> Result<(), Fault> {
        if self.synced != survives {
            // Cannot be changed within a transaction.
            let level = match survives {
                Survives::Crash => "PRAGMA synchronous = NORMAL",
                Survives::PowerCut => "PRAGMA synchronous = FULL",
            };
            sqlx::query(level).execute(&mut self.tx.db).await?;
            self.synced = survives;
        }
        if self.logs.len() > REMEMBERED {
            // Only between groups: within one, it knows places that the database does not know yet.
            self.logs.clear();
        }
        self.tx.now = crate::now();
        self.tx.gone.clear();
        self.tx.touched = Touched::default();
        Ok(())
    }

    async fn apply(&mut self, slots: &mut [Slot]) -> Result<(), Fault> {
        let alone = slots.len() == 1;
        let mut rows = Vec::new();
        for slot in slots.iter_mut() {
            match slot {
                Slot::Work { job, refused } => {
                    *refused = guarded(&mut self.tx, alone, job).await?;
                }
                Slot::Events { job, events, refused } => {
                    *refused = match &job.patch {
                        Some(patch) => match patch.apply(&job.session, &mut self.tx).await {
                            Ok(()) => None,
                            Err(Fault::Refused(error)) => Some(error),
                            Err(fault) => return Err(fault),
                        },
                        None => None,
                    };
                    if refused.is_none() {
                        *events = self.place(job).await?;
                        rows.push((self.logs[&job.session].log, &*events, &job.bodies));
                    }
                }
                Slot::Debug { .. } => {}
            }
        }
        let rows: Vec<_> = rows
            .into_iter()
            .flat_map(|(log, events, bodies)| {
                events
                    .iter()
                    .zip(bodies)
                    .map(move |(e, (_, text))| (log, e, text))
            })
            .collect();
        batch::EVENTS
            .rows(&mut self.tx.db, &rows, |query, (log, event, text)| {
                query
                    .bind(*log)
                    .bind(event.index)
                    .bind(event.ts.as_millisecond())
                    .bind(text.as_str())
            })
            .await?;
        drop(rows);
        self.apply_debug(slots).await
    }

    /// Gives events their places in their session's log.
    async fn place(&mut self, job: &EventJob) -> Result<Vec<Arc<Event>>, Fault> {
        let mut place = match self.logs.get(&job.session) {
            Some(place) => *place,
            None => self.find_place(&job.session).await?,
        };
        let ts = self.tx.now;
        let events = job.bodies.iter().zip(place.next..).map(|((body, _), index)| {
            Arc::new(Event {
                index,
                ts,
                session_id: job.session.clone(),
                body: body.clone(),
            })
        });
        let events: Vec<_> = events.collect();
        place.next += events.len() as i64;
        self.logs.insert(job.session.clone(), place);
        Ok(events)
    }

    async fn find_place(&mut self, session: &SessionId) -> Result<Place, Fault> {
        let known = sqlx::query(
            "SELECT log, (SELECT MAX(idx) FROM events WHERE events.log = event_logs.log)
             FROM event_logs WHERE session_id = $1",
        )
        .bind(session.as_str())
        .fetch_optional(&mut self.tx.db)
        .await?;
        if let Some(row) = known {
            let last: Option<i64> = row.try_get(1)?;
            return Ok(Place {
                log: row.try_get(0)?,
                next: last.map_or(0, |last| last + 1),
            });
        }
        let log = self.tx.next(Counter::EventLog, 1).await?;
        sqlx::query("INSERT INTO event_logs (session_id, log) VALUES ($1, $2)")
            .bind(session.as_str())
            .bind(log)
            .execute(&mut self.tx.db)
            .await?;
        Ok(Place { log, next: 0 })
    }

    async fn apply_debug(&mut self, slots: &mut [Slot]) -> Result<(), Fault> {
        let count = slots
            .iter()
            .filter(|slot| matches!(slot, Slot::Debug { .. }))
            .count();
        if count == 0 {
            return Ok(());
        }
        let (mut index, ts) = (self.tx.next(Counter::Debug, count).await?, self.tx.now);
        let mut rows = Vec::with_capacity(count);
        for slot in slots {
            let Slot::Debug { job, place } = slot else {
                continue;
            };
            let project = match &job.session {
                Some(session) => self.project_of(session).await?,
                None => None,
            };
            rows.push((&*place.insert(DebugPlace { index, ts, project }), &**job));
            index += 1;
        }
        batch::DEBUG_EVENTS
            .rows(&mut self.tx.db, &rows, |query, (place, job)| {
                query
                    .bind(place.index)
                    .bind(place.ts.as_millisecond())
                    .bind(job.session.as_ref().map(SessionId::as_str))
                    .bind(job.agent.as_ref().map(AsRef::<str>::as_ref))
                    .bind(place.project.as_ref().map(ProjectId::as_str))
                    .bind(job.kind)
                    .bind(job.text.as_str())
            })
            .await
    }

    async fn project_of(&mut self, session: &SessionId) -> Result<Option<ProjectId>, Fault> {
        if let Some(project) = self.projects.get(session) {
            return Ok(Some(project.clone()));
        }
        let row = sqlx::query("SELECT project_id FROM sessions WHERE session_id = $1")
            .bind(session.as_str())
            .fetch_optional(&mut self.tx.db)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let project: ProjectId = row.try_get::<&str, _>(0)?.parse()?;
        if self.projects.len() > REMEMBERED {
            self.projects.clear();
        }
        self.projects.insert(session.clone(), project.clone());
        Ok(Some(project))
    }

    /// Cleans up after a transaction that came to nothing, and says why it did.
    async fn broken(&mut self, fault: Fault) -> Error {
        // Places given out in it are not taken; what the database says holds.
        self.logs.clear();
        self.projects.clear();
        self.tx.gone.clear();
        // A commit that failed may have been written all the same.
        self.forget();
        // Fails when SQLite has rolled back by itself, which is as good.
        let _ = sqlx::query("ROLLBACK").execute(&mut self.tx.db).await;
        if sqlx::query("SELECT 1").execute(&mut self.tx.db).await.is_err() {
            match self.again.connect().await {
                Ok(db) => (self.tx.db, self.synced) = (db, Survives::Crash),
                Err(error) => tracing::error!(%error, "the database cannot be opened again"),
            }
        }
        let error = fault.into_error();
        if self.fault.lock().replace(error.clone()).is_none() {
            tracing::error!(error = %error.for_log(), "the database cannot be written");
        }
        error
    }

    /// Drops what is remembered of what this transaction touched.
    fn forget(&mut self) {
        let touched = std::mem::take(&mut self.tx.touched);
        if touched.tokens {
            self.remembered.tokens.forget();
        }
        if touched.projects {
            self.remembered.projects.forget();
            self.remembered.sessions.forget();
        }
    }

    /// Shows what is committed to whoever follows, then answers whoever asked.
    fn finish(&mut self, slots: Vec<Slot>) {
        self.forget();
        for session in std::mem::take(&mut self.tx.gone) {
            self.logs.remove(&session);
            self.projects.remove(&session);
            self.hub.forget(&session);
        }
        self.purging |= std::mem::take(&mut self.tx.purge);
        // Who begins to follow from here on finds it in the database.
        let followed = self.queue.tail.is_followed();
        let (mut recorded, mut last) = (Vec::new(), None);
        for slot in &slots {
            match slot {
                Slot::Events {
                    job,
                    events,
                    refused: None,
                } => {
                    let sizes = job.bodies.iter().map(|(_, text)| text.len());
                    self.hub.publish(&job.session, events.iter().cloned().zip(sizes));
                }
                Slot::Debug {
                    job,
                    place: Some(place),
                } => {
                    last = Some(place.index);
                    if followed {
                        recorded.push(shown(job, place));
                    }
                }
                Slot::Events { .. } | Slot::Work { .. } | Slot::Debug { .. } => {}
            }
        }
        match recorded.into_iter().collect::<Option<Vec<_>>>() {
            Some(recorded) => self.queue.tail.publish(recorded.into_iter()),
            None => self.queue.tail.empty(),
        }
        if let Some(last) = last {
            self.queue.tail.reached(last);
        }
        for slot in slots {
            slot.answer(None);
        }
    }
}

/// A debugger event as those who follow are shown it, and its size.
fn shown(job: &DebugJob, place: &DebugPlace) -> Option<(Recorded, usize)> {
    let event = job
        .event(place.index, place.ts)
        .inspect_err(|error| tracing::error!(error = %error.for_log(), "a debugger event cannot be read"))
        .ok()?;
    let recorded = Recorded {
        event: Arc::new(event),
        project: place.project.clone(),
    };
    Some((recorded, job.text.len()))
}
