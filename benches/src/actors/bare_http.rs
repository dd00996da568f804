//! A bare HTTP server: a POST that does nothing, and an event stream whose data is the time of sending.

use std::convert::Infallible;

use anyhow::Result;
use axum::{
    Router,
    response::{Sse, sse::Event},
    routing::{get, post},
};
use futures::{Stream, stream};
use tokio::sync::broadcast;

use crate::clock;

pub(crate) fn run() -> Result<()> {
    super::serve_until_stdin_ends(|| {
        let (sender, _) = broadcast::channel::<()>(16);
        let emitter = sender.clone();
        Router::new()
            .route("/post", post(|_: String| async { "{\"resolved\":true}" }))
            .route(
                "/emit",
                post(move || async move {
                    let _ = emitter.send(());
                    "{}"
                }),
            )
            .route(
                "/events",
                get(move || async move { Sse::new(events(sender.subscribe())) }),
            )
    })
}

fn events(receiver: broadcast::Receiver<()>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.ok()?;
        Some((Ok(Event::default().data(clock::now().to_string())), receiver))
    })
}
