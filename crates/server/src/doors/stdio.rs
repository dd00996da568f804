//! Streams that agents' clients lend: the server stands between an agent and its client and answers ordinary
//! calls itself. The way to the tools is the relay's: one gate.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use oubliette_bridge::{loan, outcome::Source, tap};
use oubliette_protocol::{Error, SessionId};
use oubliette_relay::OnProgress;
use oubliette_tools::{CallContext, Origin, Plane, Wanted};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::{net::UnixStream, runtime::Handle};
use tokio_util::sync::CancellationToken;

use super::relay::{self, MOST_CONNECTIONS};
use crate::app::App;

/// Every loan.
pub struct Stdio {
    app: Weak<App>,
    open: Open,
}

type Open = Arc<Mutex<HashMap<SessionId, Vec<CancellationToken>>>>;

impl Stdio {
    /// Of a server that is being made.
    pub fn new(app: Weak<App>) -> Self {
        Self {
            app,
            open: Open::default(),
        }
    }

    /// Takes a connection over. Hanging up is a refusal; the client then does without.
    pub fn borrow(&self, session: SessionId, stream: UnixStream) {
        let stop = CancellationToken::new();
        {
            let mut open = self.open.lock();
            let loans = open.entry(session.clone()).or_default();
            if loans.len() >= MOST_CONNECTIONS {
                tracing::warn!(%session, "too many clients lend their streams; one was refused");
                return;
            }
            loans.push(stop.clone());
        }
        let (app, open) = (self.app.clone(), self.open.clone());
        let loan = Loan { session, stop, open };
        tokio::spawn(async move {
            let session = loan.session.clone();
            if let Err(error) = stand_between(app, loan, stream).await {
                tracing::debug!(%session, %error, "streams were not borrowed");
            }
        });
    }

    /// Gives back every stream of a session.
    pub fn close(&self, session: &SessionId) {
        for stop in self.open.lock().remove(session).unwrap_or_default() {
            stop.cancel();
        }
    }
}

/// A place in the table, as long as it is needed.
struct Loan {
    session: SessionId,
    stop: CancellationToken,
    open: Open,
}

impl Drop for Loan {
    fn drop(&mut self) {
        // So that it can be told from the others.
        self.stop.cancel();
        let mut open = self.open.lock();
        if let Some(loans) = open.get_mut(&self.session) {
            loans.retain(|loan| !loan.is_cancelled());
            if loans.is_empty() {
                open.remove(&self.session);
            }
        }
    }
}

/// Has the streams served on the thread of the session's calls.
async fn stand_between(app: Weak<App>, loan: Loan, stream: UnixStream) -> Result<(), Error> {
    let server = || {
        app.upgrade()
            .ok_or_else(|| Error::unavailable("the server is stopping"))
    };
    let plane = server()?.sessions.plane(&loan.session).await?;
    let stream = stream.into_std().map_err(Error::internal)?;
    let thread = plane.thread().clone();
    let tools = Tools {
        app,
        plane,
        session: loan.session.clone(),
        elsewhere: Handle::current(),
    };
    thread.spawn(async move {
        let stop = loan.stop.clone();
        let borrowed = async { loan::borrow(UnixStream::from_std(stream)?).await };
        let borrowed = tokio::select! {
            () = stop.cancelled() => return,
            borrowed = borrowed => borrowed,
        };
        match borrowed {
            Ok(borrowed) => tap::run(borrowed, tools, stop).await,
            Err(error) => {
                tracing::debug!(session = %loan.session, %error, "streams were not borrowed");
            }
        }
    });
    Ok(())
}

/// The tools of one session.
struct Tools {
    app: Weak<App>,
    plane: Arc<Plane>,
    session: SessionId,
    /// Where the rest of the server runs.
    elsewhere: Handle,
}

impl tap::Tools for Tools {
    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        key: Option<&str>,
        cancel: CancellationToken,
        progress: Option<OnProgress>,
    ) -> Option<(Source, tap::Answering)> {
        let wanted = self.plane.wanted(name);
        let (source, api_key) = match wanted {
            Wanted::Any(_) | Wanted::Catalog(_) => (Source::Catalog, None),
            Wanted::Caller { .. } => (Source::Caller, None),
            Wanted::Base(_) => (Source::Data, None),
            // Without a key it is a name like any other, and the client says so.
            Wanted::Own(_) => (Source::Data, Some(key?.to_owned())),
        };
        let app = self.app.upgrade()?;
        let ctx = CallContext {
            cancel,
            turn: app.sessions.current_turn(&self.session),
            progress: progress.map(passed_on),
        };
        let (plane, session) = (self.plane.clone(), self.session.clone());
        let arguments = serde_json::from_str(arguments.get());
        let unknown = api_key.clone().filter(|key| !plane.hides(key));
        // What Oubliette does itself may start sessions and the like, which is not for this thread.
        let elsewhere = (source == Source::Data).then(|| self.elsewhere.clone());
        plane.thread().stir();
        let answer = async move {
            let arguments = arguments.map_err(|why| Error::invalid(format!("arguments: {why}")))?;
            if let Some(key) = unknown {
                relay::hide(&app, &plane, &key).await;
            }
            // A call may wait long.
            drop(app);
            let answer = plane
                .call_raw(wanted, arguments, Origin::Inside { api_key }, ctx)
                .await;
            if let Err(error) = &answer
                && error.log.is_some()
            {
                tracing::error!(%session, error = %error.for_log(), "a call over lent streams");
            }
            plane.thread().stir();
            answer
        };
        let answer: tap::Answering = match elsewhere {
            None => Box::pin(answer),
            Some(elsewhere) => {
                let task = elsewhere.spawn(answer);
                Box::pin(async { task.await.unwrap_or_else(|why| Err(Error::internal(why))) })
            }
        };
        Some((source, answer))
    }
}

fn passed_on(hearer: OnProgress) -> Arc<dyn Fn(oubliette_tools::Progress) + Send + Sync> {
    Arc::new(move |report: oubliette_tools::Progress| {
        hearer(oubliette_relay::Progress {
            progress: report.progress,
            total: report.total,
            message: report.message,
        });
    })
}
