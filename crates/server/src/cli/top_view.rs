//! What of a server `oubliette top` shows, and in which order.

use super::{
    style::AnsiStyle,
    top_data::{ServerSnapshot, TopSession},
    top_frame::TopFrame,
};

/// From how many lines on a screen has room for everything.
const ROOMY_HEIGHT: usize = 24;

/// By what sessions are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionSort {
    /// Those that wait for a person first, then those that run.
    State,
    /// The longest turn first.
    Age,
    /// Those that used the most tokens first.
    Tokens,
    /// By the agent's name.
    Agent,
}

impl SessionSort {
    /// The next order, when the key for it is pressed.
    pub(crate) fn next(self) -> Self {
        match self {
            SessionSort::State => SessionSort::Age,
            SessionSort::Age => SessionSort::Tokens,
            SessionSort::Tokens => SessionSort::Agent,
            SessionSort::Agent => SessionSort::State,
        }
    }

    /// Its name, as the heading shows it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            SessionSort::State => "state",
            SessionSort::Age => "age",
            SessionSort::Tokens => "tokens",
            SessionSort::Agent => "agent",
        }
    }
}

/// What is being looked at, and how.
#[derive(Debug, Clone)]
pub(crate) struct TopView {
    /// By what sessions are sorted.
    pub sort: SessionSort,
    /// Only sessions with this in a column.
    pub filter: String,
    /// Whether the filter is being typed.
    pub is_filtering: bool,
    /// The session under the cursor.
    pub selected: Option<String>,
    /// The session whose events are shown.
    pub opened: Option<String>,
    /// Whether ended and failed sessions are shown.
    pub all_sessions: bool,
    /// Why the last look failed.
    pub error: Option<String>,
}

/// The size of a frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameSize {
    /// Columns of a line.
    pub width: usize,
    /// Lines of the frame; absent when there is no screen to fit into.
    pub height: Option<usize>,
}

impl Default for TopView {
    fn default() -> Self {
        Self {
            sort: SessionSort::State,
            filter: String::new(),
            is_filtering: false,
            selected: None,
            opened: None,
            all_sessions: false,
            error: None,
        }
    }
}

impl TopView {
    /// The sessions to show, in order.
    pub(crate) fn sessions<'a>(&self, servers: &'a [ServerSnapshot]) -> Vec<&'a TopSession> {
        let filter = self.filter.to_lowercase();
        let fits = |row: &&TopSession| {
            let columns = [&row.session_id, &row.agent, &row.state, &row.title];
            columns
                .iter()
                .any(|column| column.to_lowercase().contains(&filter))
        };
        let mut sessions: Vec<&TopSession> = servers
            .iter()
            .flat_map(|server| &server.sessions)
            .filter(fits)
            .collect();
        match self.sort {
            SessionSort::State => sessions.sort_by_key(|row| state_rank(&row.state)),
            SessionSort::Age => sessions.sort_by_key(|row| std::cmp::Reverse(row.turn_age_s)),
            SessionSort::Tokens => sessions.sort_by_key(|row| std::cmp::Reverse(row.tokens)),
            SessionSort::Agent => sessions.sort_by(|a, b| a.agent.cmp(&b.agent)),
        }
        sessions
    }

    /// Moves the cursor by this many sessions.
    pub(crate) fn move_cursor(&mut self, servers: &[ServerSnapshot], by: isize) {
        let sessions = self.sessions(servers);
        let at = sessions
            .iter()
            .position(|row| Some(&row.session_id) == self.selected.as_ref());
        let to = match at {
            Some(at) => at.saturating_add_signed(by).min(sessions.len().saturating_sub(1)),
            None => 0,
        };
        let selected = sessions.get(to).map(|row| row.session_id.clone());
        self.selected = selected;
    }

    /// The lines of a frame.
    pub(crate) fn format(
        &self,
        servers: &[ServerSnapshot],
        size: FrameSize,
        style: AnsiStyle,
    ) -> Vec<String> {
        let mut frame = TopFrame::new(size.width, style);
        frame.add_header(servers, self.error.as_deref());
        if let Some(opened) = &self.opened {
            frame.add_opened(servers, opened, size.height);
            return frame.lines;
        }
        // The parts below the sessions come first: the sessions get the room that is left.
        let section_rows = size.height.map_or(usize::MAX, |height| (height / 8).max(1));
        let mut below = TopFrame::new(size.width, style);
        below.add_calls(servers, section_rows);
        below.add_approvals(servers, section_rows);
        below.add_tool_servers(servers, section_rows);
        // A single server is named in the header; on a small screen its own line would take a session's place.
        let has_several = servers.iter().map(|server| server.members.len()).sum::<usize>() > 1;
        if has_several || size.height.is_none_or(|height| height >= ROOMY_HEIGHT) {
            below.add_members(servers, section_rows);
        }
        let keys = usize::from(size.height.is_some());
        let room = size.height.map_or(usize::MAX, |height| {
            height.saturating_sub(frame.lines.len() + below.lines.len() + keys)
        });
        frame.add_sessions(self, &self.sessions(servers), room);
        frame.lines.append(&mut below.lines);
        if let Some(height) = size.height {
            frame.lines.truncate(height.saturating_sub(1));
            frame.lines.resize(height.saturating_sub(1), String::new());
            frame.add_keys(self);
        }
        frame.lines
    }
}

/// Those that wait for a person first, those that are over last.
fn state_rank(state: &str) -> u8 {
    match state {
        "waiting" => 0,
        "running" => 1,
        "starting" | "switching" => 2,
        "failed" => 3,
        "idle" => 4,
        _ => 5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{
        style::display_width,
        top_data::{TopApproval, TopCall, TopServer, TopToolServer},
    };

    fn session(id: &str, state: &str, tokens: u64) -> TopSession {
        TopSession {
            session_id: format!("gogol_{id}"),
            agent: "a".repeat(10_000),
            state: state.into(),
            tokens,
            title: "t".repeat(80),
            ..TopSession::default()
        }
    }

    fn server() -> ServerSnapshot {
        ServerSnapshot {
            url: "http://127.0.0.1:1".into(),
            version: "1".into(),
            sessions: vec![
                session("a", "idle", 5),
                session("b", "waiting", 1),
                session("c", "running", 9),
            ],
            calls: (0..40)
                .map(|n| TopCall {
                    session_id: "gogol_c".into(),
                    agent: "demo".into(),
                    tool: "write".into(),
                    arguments: "x".repeat(300),
                    age_s: n,
                })
                .collect(),
            approvals: vec![TopApproval {
                approval_id: "appr_1".into(),
                session_id: "gogol_b".into(),
                agent: "demo".into(),
                tool: "write".into(),
                arguments: String::new(),
                age_s: 65,
            }],
            tool_servers: vec![TopToolServer {
                id: "web".into(),
                status: "red".into(),
                sessions: 2,
                error: Some("gone".into()),
            }],
            members: ["srv_a", "srv_b"]
                .iter()
                .map(|id| TopServer {
                    server_id: (*id).to_owned(),
                    address: "http://127.0.0.1:1".into(),
                    version: "1.0".into(),
                    sessions: 2,
                    age_s: 7_200,
                    seen_s: 3,
                })
                .collect(),
            events: Vec::new(),
        }
    }

    #[test]
    fn a_frame_fits_the_screen_whatever_its_size() {
        for (width, height) in [(40, 10), (80, 24), (200, 60)] {
            let size = FrameSize {
                width,
                height: Some(height),
            };
            let lines = TopView::default().format(&[server()], size, AnsiStyle::plain());
            assert_eq!(lines.len(), height);
            assert!(
                lines.iter().all(|line| display_width(line) <= width),
                "{width}: {lines:#?}"
            );
        }
    }

    #[test]
    fn sessions_are_sorted_filtered_and_selected() {
        let servers = [server()];
        let mut view = TopView::default();
        let ids = |view: &TopView| -> Vec<String> {
            view.sessions(&servers)
                .iter()
                .map(|row| row.session_id.clone())
                .collect()
        };
        assert_eq!(ids(&view), ["gogol_b", "gogol_c", "gogol_a"]);
        view.sort = SessionSort::Tokens;
        assert_eq!(ids(&view), ["gogol_c", "gogol_a", "gogol_b"]);
        view.move_cursor(&servers, 1);
        assert_eq!(view.selected.as_deref(), Some("gogol_c"));
        view.move_cursor(&servers, 1);
        view.move_cursor(&servers, 5);
        assert_eq!(view.selected.as_deref(), Some("gogol_b"));
        view.filter = "RUNN".into();
        assert_eq!(ids(&view), ["gogol_c"]);
    }

    #[test]
    fn without_a_screen_everything_is_shown() {
        let size = FrameSize {
            width: 200,
            height: None,
        };
        let text = TopView::default()
            .format(&[server()], size, AnsiStyle::plain())
            .join("\n");
        for wanted in [
            "3 sessions, 1 running, 1 waiting",
            "gogol_b",
            "CALLS IN PROGRESS 40",
            "1m05s",
            "appr_1",
            "● red",
            "gone",
            "SERVERS 2",
            "srv_b",
            "2h00m",
        ] {
            assert!(text.contains(wanted), "{wanted}:\n{text}");
        }
        assert!(!text.contains("q quit"));
    }
}
