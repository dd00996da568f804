//! Where a session's turns begin and end, by what its log says.

use std::sync::Arc;

use jiff::Timestamp;
use oubliette_protocol::{
    Slug,
    event::{Event, EventBody, Role, Status},
};

use super::span::Span;

/// The turns of one session.
pub(super) struct Turns {
    /// Who works in the next one.
    pub(super) agent: Option<Slug>,
    /// The last event that was looked at.
    pub(super) seen: i64,
    open: Option<Open>,
}

/// A turn under way.
struct Open {
    agent: Option<Slug>,
    began: Timestamp,
    turn: Option<u64>,
    running: bool,
    error: Option<(Timestamp, String)>,
}

impl Turns {
    pub(super) fn new(agent: Option<Slug>, seen: i64) -> Self {
        Self {
            agent,
            seen,
            open: None,
        }
    }

    pub(super) fn under_way(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the session's row tells, from this event on, which turn it is.
    pub(super) fn needs_number(&self, event: &Event) -> bool {
        let asked = matches!(&event.body, EventBody::Message { role: Role::User, .. });
        asked && self.open.as_ref().is_some_and(|open| open.turn.is_none())
    }

    pub(super) fn number(&mut self, turn: u64) {
        if let Some(open) = &mut self.open {
            open.turn = Some(turn);
        }
    }

    /// Takes note of an event; gives the span of a turn that is over by it.
    pub(super) fn take(&mut self, event: &Event) -> Option<Span> {
        self.seen = event.index;
        match &event.body {
            EventBody::Status { status, reason } => match status {
                Status::Running if self.open.as_ref().is_some_and(|open| !open.running) => {
                    self.open.as_mut()?.running = true;
                    None
                }
                Status::Starting | Status::Running => {
                    let before = self.fail(event, None);
                    self.open = Some(self.begin(event.ts, *status == Status::Running));
                    before
                }
                Status::Idle | Status::Failed | Status::Ended => self.fail(event, reason.as_deref()),
                // Asked for in the middle of a turn, which may still end well.
                Status::Switching => None,
            },
            EventBody::Error { message, .. } => {
                self.open.as_mut()?.error = Some((event.ts, message.clone()));
                None
            }
            EventBody::TurnCompleted {
                turn, stop_reason, ..
            } => {
                let open = self.open.take().unwrap_or_else(|| self.begin(event.ts, true));
                let span = Span::turn(
                    &event.session_id,
                    *turn,
                    open.agent.as_ref(),
                    open.began,
                    event.ts,
                );
                Some(span.with("oubliette.stop_reason", stop_reason.as_str()))
            }
            _ => None,
        }
    }

    fn begin(&self, began: Timestamp, running: bool) -> Open {
        Open {
            agent: self.agent.clone(),
            began,
            turn: None,
            running,
            error: None,
        }
    }

    /// The turn under way ended without saying so. Nobody's message: it was none.
    fn fail(&mut self, event: &Event, reason: Option<&str>) -> Option<Span> {
        let open = self.open.take()?;
        let reason = reason.unwrap_or("the turn was not completed");
        let (ended, error) = open.error.unwrap_or_else(|| (event.ts, reason.to_owned()));
        let span = Span::turn(
            &event.session_id,
            open.turn?,
            open.agent.as_ref(),
            open.began,
            ended,
        );
        Some(span.failed(&error))
    }
}

/// The index past which lies what a context built at `built` is for: the turn under way then, or what came
/// later. `None` when all of `tail` is later.
pub(super) fn begin(tail: &[Arc<Event>], built: Timestamp) -> Option<i64> {
    let (mut begin, mut past) = (None, None);
    for event in tail.iter().take_while(|event| event.ts <= built) {
        past = Some(event.index);
        match &event.body {
            EventBody::Status {
                status: Status::Starting,
                ..
            } => begin = Some(event.index - 1),
            EventBody::Status {
                status: Status::Running,
                ..
            } => begin = begin.or(Some(event.index - 1)),
            EventBody::Status {
                status: Status::Switching,
                ..
            } => {}
            EventBody::Status { .. } | EventBody::TurnCompleted { .. } => begin = None,
            _ => {}
        }
    }
    begin.or(past)
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::{ErrorCode, SessionId};

    use super::*;

    fn log(bodies: Vec<EventBody>) -> Vec<Arc<Event>> {
        let session_id = SessionId::generate();
        let event = |(index, body)| Event {
            index,
            ts: Timestamp::from_second(index).unwrap(),
            session_id: session_id.clone(),
            body,
        };
        (0..).zip(bodies).map(event).map(Arc::new).collect()
    }

    fn status(status: Status) -> EventBody {
        EventBody::Status { status, reason: None }
    }

    fn message() -> EventBody {
        let (role, text) = (Role::User, "hi".into());
        EventBody::Message { role, text }
    }

    fn completed(turn: u64) -> EventBody {
        let (stop_reason, text) = ("end_turn".into(), String::new());
        EventBody::TurnCompleted {
            turn,
            stop_reason,
            text,
        }
    }

    fn error() -> EventBody {
        let (code, message) = (ErrorCode::Unavailable, "cancelled".into());
        EventBody::Error { code, message }
    }

    #[test]
    fn every_turn_is_one_span_however_it_ends() {
        use Status::{Failed, Idle, Running, Starting, Switching};
        let log = log(vec![
            status(Starting), // 0: turn 1
            status(Running),
            message(),
            status(Switching),
            completed(1),
            status(Running), // 5: turn 2, cancelled by a switch
            message(),
            status(Switching),
            error(),
            status(Running), // 9: turn 3
            message(),
            error(),
            status(Failed),
            status(Starting), // 13: tools made ready, no turn
            status(Idle),
        ]);
        let (mut turns, mut number, mut spans) = (Turns::new(None, -1), 0, Vec::new());
        for event in &log {
            if turns.needs_number(event) {
                number += 1;
                turns.number(number);
            }
            spans.extend(turns.take(event).map(|span| {
                let span = span.json();
                let second = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap() / 1_000_000_000;
                (
                    second("startTimeUnixNano"),
                    second("endTimeUnixNano"),
                    span["status"]["code"] == 2,
                )
            }));
        }
        assert_eq!(spans, [(0, 4, false), (5, 8, true), (9, 11, true)]);
        assert!(!turns.under_way());
    }

    #[test]
    fn a_session_is_followed_from_the_turn_that_is_under_way() {
        use Status::{Idle, Running, Starting};
        let log = log(vec![
            status(Running),
            completed(1),
            status(Idle),
            status(Starting),
            status(Running),
            completed(2),
            status(Idle),
        ]);
        let begin = |second| begin(&log, Timestamp::from_second(second).unwrap());
        assert_eq!(begin(-1), None);
        assert_eq!(
            [begin(0), begin(2), begin(3), begin(4)],
            [Some(-1), Some(2), Some(2), Some(2)]
        );
        assert_eq!(begin(6), Some(6));
    }
}
