//! Runs the lent function for each request of the agent and sends its answer, once.

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

/// How many request ids are remembered, to recognise repeated requests.
const MAX_REMEMBERED_IDS: usize = 10_000;
/// The waits between attempts to send an answer, in milliseconds: 40 s in total, within the minute after which
/// the server's default timeout ends the request.
const RETRY_WAITS_MS: [u64; 7] = [50, 100, 300, 1_000, 3_000, 9_000, 27_000];

/// Runs and answers the requests of one session.
pub(crate) struct RequestHandler {
    lend: Arc<Lend>,
    session_id: String,
    slots: Arc<Semaphore>,
    tasks: JoinSet<()>,
    seen: HashMap<String, AbortHandle>,
    oldest_first: VecDeque<String>,
}

impl RequestHandler {
    pub(crate) fn new(lend: Arc<Lend>, session_id: String) -> Self {
        let places = Arc::new(Semaphore::new(lend.concurrency));
        Self {
            lend,
            session_id,
            slots: places,
            tasks: JoinSet::new(),
            seen: HashMap::new(),
            oldest_first: VecDeque::new(),
        }
    }

    /// Starts the function for a request, unless the request is another caller's or has been seen before.
    pub(crate) fn start_request(&mut self, event: &Event) {
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
        let run = self.lend.find_tool(tool).map(|tool| tool.run.clone());
        let unknown = format!("this program lends no tool {tool}");
        // Called inside the task, so that a panic before the function's first await does not end the stream's task.
        let outcome = async move {
            match run {
                Some(run) => run(arguments).await,
                None => Err(unknown),
            }
        };
        let (places, client) = (self.slots.clone(), self.lend.client.clone());
        let (session_id, request_id) = (self.session_id.clone(), id.to_owned());
        let task = self.tasks.spawn(async move {
            let outcome = {
                let _place = places.acquire_owned().await;
                AssertUnwindSafe(outcome).catch_unwind().await
            };
            let outcome = outcome.unwrap_or_else(|_| Err("the tool failed".into()));
            send_answer(&client, &session_id, &request_id, outcome).await;
        });
        self.remember(id.to_owned(), task);
    }

    /// Stops the function of a request that ended without an answer (cancelled, timed out): nobody waits for its
    /// result.
    pub(crate) fn stop_if_unanswered(&mut self, event: &Event) {
        let answered = matches!(event.text("outcome"), Some("answered" | "error"));
        if let Some(task) = event.text("request_id").and_then(|id| self.seen.get(id))
            && !answered
        {
            task.abort();
        }
    }

    fn remember(&mut self, id: String, task: AbortHandle) {
        self.oldest_first.push_back(id.clone());
        self.seen.insert(id, task);
        if self.oldest_first.len() > MAX_REMEMBERED_IDS
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.seen.remove(&oldest);
        }
    }
}

/// Sends an answer, with retries, until the server accepts it or refuses it for good.
async fn send_answer(client: &Oubliette, session_id: &str, request_id: &str, outcome: Result<Value, String>) {
    let mut answer = json!({ "session_id": session_id, "request_id": request_id });
    match outcome {
        Ok(result) => answer["result"] = result,
        Err(error) => answer["error"] = error.into(),
    }
    for wait in RETRY_WAITS_MS {
        match client.call("caller_tool_response", &answer).await {
            Ok(_) => return,
            // The result is too large or invalid: send that as the tool's error, so that the agent learns of it.
            Err(Error::Refused { code, message })
                if answer.get("result").is_some()
                    && matches!(code.as_str(), "invalid_argument" | "limit_exceeded") =>
            {
                let text = format!("the answer was refused: {message}");
                answer = json!({ "session_id": session_id, "request_id": request_id, "error": text });
            }
            Err(why) if why.is_transient() => tokio::time::sleep(Duration::from_millis(wait)).await,
            // Too late, or answered before: a retry would not change that.
            Err(_) => return,
        }
    }
}
