//! Requests worked on, each answered once.

use std::{
    collections::{HashMap, VecDeque},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use serde_json::{Value, json};
use tokio::{
    sync::Semaphore,
    task::{AbortHandle, JoinSet},
};

use crate::{Error, Event, Lend, Oubliette};

/// How many request ids are remembered, to know a repeat.
const REMEMBERED: usize = 10_000;
/// Waits between attempts to deliver an answer; the request times out at the server after a minute.
const RETRIES: [u64; 7] = [50, 100, 300, 1_000, 3_000, 9_000, 27_000];

/// The requests of one session.
pub(crate) struct Desk {
    lend: Arc<Lend>,
    session_id: String,
    places: Arc<Semaphore>,
    tasks: JoinSet<()>,
    seen: HashMap<String, AbortHandle>,
    order: VecDeque<String>,
}

impl Desk {
    pub(crate) fn new(lend: Arc<Lend>, session_id: String) -> Self {
        let places = Arc::new(Semaphore::new(lend.concurrency));
        Self {
            lend,
            session_id,
            places,
            tasks: JoinSet::new(),
            seen: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Starts working on a request, unless it is not ours or came before.
    pub(crate) fn request(&mut self, event: &Event) {
        while self.tasks.try_join_next().is_some() {}
        let (Some(id), Some(tool)) = (event.text("request_id"), event.text("tool")) else {
            return;
        };
        if event.text("caller_id") != Some(&self.lend.caller_id) || self.seen.contains_key(id) {
            return;
        }
        let arguments = event
            .fields
            .get("arguments")
            .cloned()
            .unwrap_or_else(|| json!({}));
        let run = self.lend.find(tool).map(|tool| tool.run.clone());
        let unknown = format!("this program lends no tool {tool}");
        // Called inside the task: a function that panics before its first await must not end the stream.
        let outcome = async move {
            match run {
                Some(run) => run(arguments).await,
                None => Err(unknown),
            }
        };
        let (places, client) = (self.places.clone(), self.lend.client.clone());
        let (session_id, request_id) = (self.session_id.clone(), id.to_owned());
        let task = self.tasks.spawn(async move {
            let outcome = {
                let _place = places.acquire_owned().await;
                AssertUnwindSafe(outcome).catch_unwind().await
            };
            let outcome = outcome.unwrap_or_else(|_| Err("the tool failed".into()));
            deliver(&client, &session_id, &request_id, outcome).await;
        });
        self.remember(id.to_owned(), task);
    }

    /// The server no longer waits for this one; what is still running is stopped.
    pub(crate) fn done(&mut self, event: &Event) {
        let answered = matches!(event.text("outcome"), Some("answered" | "error"));
        if let Some(task) = event.text("request_id").and_then(|id| self.seen.get(id))
            && !answered
        {
            task.abort();
        }
    }

    fn remember(&mut self, id: String, task: AbortHandle) {
        self.order.push_back(id.clone());
        self.seen.insert(id, task);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.seen.remove(&oldest);
        }
    }
}

/// Sends an answer until the server has it or does not want it.
async fn deliver(client: &Oubliette, session_id: &str, request_id: &str, outcome: Result<Value, String>) {
    let mut answer = json!({ "session_id": session_id, "request_id": request_id });
    match outcome {
        Ok(result) => answer["result"] = result,
        Err(error) => answer["error"] = error.into(),
    }
    for wait in RETRIES {
        match client.call("caller_tool_response", &answer).await {
            Ok(_) => return,
            // Too big or not JSON the server takes: the agent should at least learn that.
            Err(Error::Refused { code, message })
                if answer.get("result").is_some()
                    && matches!(code.as_str(), "invalid_argument" | "limit_exceeded") =>
            {
                let text = format!("the answer was refused: {message}");
                answer = json!({ "session_id": session_id, "request_id": request_id, "error": text });
            }
            Err(why) if why.is_passing() => tokio::time::sleep(Duration::from_millis(wait)).await,
            // Late or repeated, which no further attempt would change.
            Err(_) => return,
        }
    }
}
