//! Derives from a session's event log where its turns begin and end.

use std::sync::Arc;

use jiff::Timestamp;
use oubliette_protocol::{
    Slug,
    event::{EventBody, MessageRole, SessionEvent, SessionStatus},
};

use super::span::OtlpSpan;

/// Tracks the turns of one session.
pub(super) struct TurnTracker {
    /// The agent that works in the next turn.
    pub(super) agent: Option<Slug>,
    /// Index of the last event handled.
    pub(super) last_seen: i64,
    open: Option<OpenTurn>,
}

/// A turn that has begun and not ended.
struct OpenTurn {
    agent: Option<Slug>,
    started: Timestamp,
    turn: Option<u64>,
    running: bool,
    error: Option<(Timestamp, String)>,
}

impl TurnTracker {
    pub(super) fn new(agent: Option<Slug>, last_seen: i64) -> Self {
        Self {
            agent,
            last_seen,
            open: None,
        }
    }

    pub(super) fn in_turn(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the open turn's number is unknown and can, from this event on, be read from the session's row.
    pub(super) fn needs_turn_number(&self, event: &SessionEvent) -> bool {
        let asked = matches!(
            &event.body,
            EventBody::Message {
                role: MessageRole::User,
                ..
            }
        );
        asked && self.open.as_ref().is_some_and(|open| open.turn.is_none())
    }

    pub(super) fn set_turn_number(&mut self, turn: u64) {
        if let Some(open) = &mut self.open {
            open.turn = Some(turn);
        }
    }

    /// Handles an event; returns the span of the turn it ends, if it ends one.
    pub(super) fn observe(&mut self, event: &SessionEvent) -> Option<OtlpSpan> {
        self.last_seen = event.index;
        match &event.body {
            EventBody::Status { status, reason } => match status {
                SessionStatus::Running if self.open.as_ref().is_some_and(|open| !open.running) => {
                    self.open.as_mut()?.running = true;
                    None
                }
                SessionStatus::Starting | SessionStatus::Running => {
                    let before = self.close_uncompleted(event, None);
                    self.open = Some(self.open_turn(event.ts, *status == SessionStatus::Running));
                    before
                }
                SessionStatus::Idle | SessionStatus::Failed | SessionStatus::Ended => {
                    self.close_uncompleted(event, reason.as_deref())
                }
                // A switch of agents may be requested in the middle of a turn, which may still be completed.
                SessionStatus::Switching => None,
            },
            EventBody::Error { message, .. } => {
                self.open.as_mut()?.error = Some((event.ts, message.clone()));
                None
            }
            EventBody::TurnCompleted {
                turn, stop_reason, ..
            } => {
                let open = self.open.take().unwrap_or_else(|| self.open_turn(event.ts, true));
                let span = OtlpSpan::for_turn(
                    &event.session_id,
                    *turn,
                    open.agent.as_ref(),
                    open.started,
                    event.ts,
                );
                Some(span.with_attribute("oubliette.stop_reason", stop_reason.as_str()))
            }
            _ => None,
        }
    }

    fn open_turn(&self, started: Timestamp, running: bool) -> OpenTurn {
        OpenTurn {
            agent: self.agent.clone(),
            started,
            turn: None,
            running,
            error: None,
        }
    }

    /// Ends the open turn, if any, without a `turn_completed` event. A turn whose number was never set had no message,
    /// so it gets no span.
    fn close_uncompleted(&mut self, event: &SessionEvent, reason: Option<&str>) -> Option<OtlpSpan> {
        let open = self.open.take()?;
        let reason = reason.unwrap_or("the turn was not completed");
        let (ended, error) = open.error.unwrap_or_else(|| (event.ts, reason.to_owned()));
        let span = OtlpSpan::for_turn(
            &event.session_id,
            open.turn?,
            open.agent.as_ref(),
            open.started,
            ended,
        );
        Some(span.with_error(&error))
    }
}

/// The index after which the turn begins that a context built at `built` is for: the turn open at that time, else
/// whatever follows. `None` when every event of `tail` is later than `built`.
pub(super) fn find_turn_start(tail: &[Arc<SessionEvent>], built: Timestamp) -> Option<i64> {
    let (mut turn_start, mut last_before) = (None, None);
    for event in tail.iter().take_while(|event| event.ts <= built) {
        last_before = Some(event.index);
        match &event.body {
            EventBody::Status {
                status: SessionStatus::Starting,
                ..
            } => turn_start = Some(event.index - 1),
            EventBody::Status {
                status: SessionStatus::Running,
                ..
            } => turn_start = turn_start.or(Some(event.index - 1)),
            EventBody::Status {
                status: SessionStatus::Switching,
                ..
            } => {}
            EventBody::Status { .. } | EventBody::TurnCompleted { .. } => turn_start = None,
            _ => {}
        }
    }
    turn_start.or(last_before)
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::{ErrorCode, SessionId};

    use super::*;

    fn log(bodies: Vec<EventBody>) -> Vec<Arc<SessionEvent>> {
        let session_id = SessionId::generate();
        let event = |(index, body)| SessionEvent {
            index,
            ts: Timestamp::from_second(index).unwrap(),
            session_id: session_id.clone(),
            body,
        };
        (0..).zip(bodies).map(event).map(Arc::new).collect()
    }

    fn status(status: SessionStatus) -> EventBody {
        EventBody::Status { status, reason: None }
    }

    fn message() -> EventBody {
        let (role, text) = (MessageRole::User, "hi".into());
        EventBody::Message { role, text }
    }

    fn completed(turn: u64) -> EventBody {
        let (stop_reason, text) = ("end_turn".into(), String::new());
        EventBody::TurnCompleted {
            turn,
            stop_reason,
            text,
            usage: None,
        }
    }

    fn error() -> EventBody {
        EventBody::error(ErrorCode::Unavailable, "cancelled")
    }

    #[test]
    fn every_turn_is_one_span_however_it_ends() {
        use SessionStatus::{Failed, Idle, Running, Starting, Switching};
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
            status(Starting), // 13: tools prepared, no turn
            status(Idle),
        ]);
        let (mut turns, mut number, mut spans) = (TurnTracker::new(None, -1), 0, Vec::new());
        for event in &log {
            if turns.needs_turn_number(event) {
                number += 1;
                turns.set_turn_number(number);
            }
            spans.extend(turns.observe(event).map(|span| {
                let span = span.into_json();
                let second = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap() / 1_000_000_000;
                (
                    second("startTimeUnixNano"),
                    second("endTimeUnixNano"),
                    span["status"]["code"] == 2,
                )
            }));
        }
        assert_eq!(spans, [(0, 4, false), (5, 8, true), (9, 11, true)]);
        assert!(!turns.in_turn());
    }

    #[test]
    fn a_session_is_followed_from_its_open_turn() {
        use SessionStatus::{Idle, Running, Starting};
        let log = log(vec![
            status(Running),
            completed(1),
            status(Idle),
            status(Starting),
            status(Running),
            completed(2),
            status(Idle),
        ]);
        let begin = |second| find_turn_start(&log, Timestamp::from_second(second).unwrap());
        assert_eq!(begin(-1), None);
        assert_eq!(
            [begin(0), begin(2), begin(3), begin(4)],
            [Some(-1), Some(2), Some(2), Some(2)]
        );
        assert_eq!(begin(6), Some(6));
    }
}
