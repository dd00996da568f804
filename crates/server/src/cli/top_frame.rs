//! Lays out what `oubliette top` shows as lines of text.

use super::{
    session::format_event,
    style::{AnsiStyle, age_text, char_width, fold_to_line, pad, plural, short_count},
    top_data::{ServerSnapshot, TopSession},
    top_view::TopView,
};

/// Lines that are being laid out.
pub(crate) struct TopFrame {
    /// The lines so far.
    pub(crate) lines: Vec<String>,
    width: usize,
    style: AnsiStyle,
}

impl TopFrame {
    /// No lines yet; each will be at most this wide.
    pub(crate) fn new(width: usize, style: AnsiStyle) -> Self {
        Self {
            lines: Vec::new(),
            width,
            style,
        }
    }

    /// A line for each server, and why the last look failed.
    pub(crate) fn add_header(&mut self, servers: &[ServerSnapshot], error: Option<&str>) {
        for server in servers {
            let count = |state: &str| server.sessions.iter().filter(|row| row.state == state).count();
            let said = format!(
                "oubliette {} · {} · {}, {} running, {} waiting · {} · {}",
                server.version,
                server.url,
                plural(server.sessions.len(), "session"),
                count("running"),
                count("waiting"),
                plural(server.calls.len(), "call"),
                plural(server.approvals.len(), "approval"),
            );
            let said = fold_to_line(&said, self.width);
            self.lines.push(self.style.bold(&said));
        }
        if let Some(error) = error {
            let said = fold_to_line(&format!("what is shown is old: {error}"), self.width);
            self.lines.push(self.style.red(&said));
        }
    }

    fn add_heading(&mut self, text: &str) {
        let text = fold_to_line(text, self.width);
        self.lines.push(self.style.bold(&text));
    }

    /// The sessions, as many as there is room for.
    pub(crate) fn add_sessions(&mut self, view: &TopView, sessions: &[&TopSession], room: usize) {
        let mut heading = format!("SESSIONS by {}", view.sort.name());
        if !view.filter.is_empty() || view.is_filtering {
            heading.push_str(&format!(" · filter: {}", view.filter));
        }
        self.lines.push(String::new());
        self.add_heading(&heading);
        let columns = pad_columns(
            &[
                "STATE", "AGENT", "TURN", "AGE", "CALLS", "TOKENS", "USD", "SESSION", "TITLE",
            ],
            self.width,
        );
        let columns = fold_line(&columns, self.width.saturating_sub(2));
        self.lines.push(self.style.dim(&format!("  {columns}")));
        if sessions.is_empty() {
            self.lines.push("  none".to_owned());
        }
        // Enough of them that the one under the cursor is visible.
        let rows = room.saturating_sub(3).max(1);
        let at = sessions
            .iter()
            .position(|row| Some(&row.session_id) == view.selected.as_ref());
        let first = at.map_or(0, |at| (at + 1).saturating_sub(rows));
        for row in sessions.iter().skip(first).take(rows) {
            let is_selected = view.selected.as_ref() == Some(&row.session_id);
            self.add_session(row, is_selected);
        }
    }

    fn add_session(&mut self, row: &TopSession, is_selected: bool) {
        let age = row.turn_age_s.map_or_else(|| "-".to_owned(), age_text);
        let cost = row
            .cost_usd
            .map_or_else(|| "-".to_owned(), |usd| format!("{usd:.4}"));
        let cells = [
            row.state.as_str(),
            &row.agent,
            &row.turn.to_string(),
            &age,
            &row.calls.to_string(),
            &short_count(row.tokens),
            &cost,
            &row.session_id,
            &row.title,
        ];
        let line = fold_line(&pad_columns(&cells, self.width), self.width.saturating_sub(2));
        let mark = if is_selected { "›" } else { " " };
        let line = match row.state.as_str() {
            "waiting" => self.style.yellow(&line),
            "running" | "starting" | "switching" => self.style.green(&line),
            "failed" => self.style.red(&line),
            "ended" => self.style.dim(&line),
            _ => line,
        };
        self.lines.push(format!("{} {line}", self.style.bold(mark)));
    }

    fn add_rows(&mut self, heading: &str, rows: Vec<String>, most: usize) {
        self.lines.push(String::new());
        self.add_heading(&format!("{heading} {}", rows.len()));
        let left = rows.len().saturating_sub(most);
        for row in rows.into_iter().take(most) {
            let row = fold_line(&row, self.width.saturating_sub(2));
            self.lines.push(format!("  {row}"));
        }
        if left > 0 {
            self.lines.push(self.style.dim(&format!("  … and {left} more")));
        }
    }

    /// The calls in progress.
    pub(crate) fn add_calls(&mut self, servers: &[ServerSnapshot], most: usize) {
        let calls = servers.iter().flat_map(|server| &server.calls);
        let rows = calls.map(|call| {
            let age = age_text(call.age_s);
            format!(
                "{age:>6}  {}  {} {}",
                pad(&call.agent, 14),
                call.tool,
                call.arguments
            )
        });
        self.add_rows("CALLS IN PROGRESS", rows.collect(), most);
    }

    /// The approvals that wait.
    pub(crate) fn add_approvals(&mut self, servers: &[ServerSnapshot], most: usize) {
        let approvals = servers.iter().flat_map(|server| &server.approvals);
        let rows = approvals.map(|approval| {
            let age = age_text(approval.age_s);
            format!(
                "{age:>6}  {}  {}  {} {}",
                pad(&approval.agent, 14),
                approval.approval_id,
                approval.tool,
                approval.arguments
            )
        });
        self.add_rows("APPROVALS WAITING", rows.collect(), most);
    }

    /// The tool servers, with their lights.
    pub(crate) fn add_tool_servers(&mut self, servers: &[ServerSnapshot], most: usize) {
        let tool_servers = servers.iter().flat_map(|server| &server.tool_servers);
        let rows = tool_servers.map(|server| {
            let error = server.error.as_deref().unwrap_or_default();
            format!(
                "● {}  {}  {}  {error}",
                pad(&server.status, 6),
                pad(&server.id, 24),
                plural(server.sessions, "session")
            )
        });
        let start = self.lines.len();
        self.add_rows("TOOL SERVERS", rows.collect(), most);
        // Coloured after they are cut: colour codes have no width.
        for line in &mut self.lines[start..] {
            let style = self.style;
            if line.starts_with("  ● red") {
                *line = style.red(line);
            } else if line.starts_with("  ● yellow") {
                *line = style.yellow(line);
            } else if line.starts_with("  ● green") {
                *line = style.green(line);
            }
        }
    }

    /// The servers, with how long ago each was seen.
    pub(crate) fn add_members(&mut self, servers: &[ServerSnapshot], most: usize) {
        let members = servers.iter().flat_map(|server| &server.members);
        let rows = members.map(|member| {
            format!(
                "{:>6}  {}  {:>12}  seen {:>5} ago  {}  {}",
                age_text(member.age_s),
                pad(&member.version, 9),
                plural(usize::try_from(member.sessions).unwrap_or(usize::MAX), "session"),
                age_text(member.seen_s),
                member.address,
                member.server_id,
            )
        });
        self.add_rows("SERVERS", rows.collect(), most);
    }

    /// The session that is opened: its row, then its last events.
    pub(crate) fn add_opened(&mut self, servers: &[ServerSnapshot], opened: &str, height: Option<usize>) {
        let row = servers
            .iter()
            .flat_map(|server| &server.sessions)
            .find(|row| row.session_id == opened);
        self.lines.push(String::new());
        match row {
            Some(row) => self.add_session(row, false),
            None => self.lines.push(format!("  {} is over", fold_to_line(opened, 60))),
        }
        self.lines.push(String::new());
        let events = servers.iter().flat_map(|server| &server.events);
        let events: Vec<String> = events
            .map(|event| fold_line(&format_event(event, AnsiStyle::plain(), self.width), self.width))
            .collect();
        let room = height.map_or(usize::MAX, |height| height.saturating_sub(self.lines.len() + 1));
        let first = events.len().saturating_sub(room);
        self.lines.extend(events.into_iter().skip(first));
        if let Some(height) = height {
            self.lines.resize(height.saturating_sub(1), String::new());
            let keys = fold_to_line("Esc back · q quit", self.width);
            self.lines.push(self.style.dim(&keys));
        }
    }

    /// The keys there are.
    pub(crate) fn add_keys(&mut self, view: &TopView) {
        let keys = match view.is_filtering {
            true => "type to filter · Enter keep · Esc clear".to_owned(),
            false => {
                let all = if view.all_sessions {
                    "active only"
                } else {
                    "ended too"
                };
                format!("↑↓ select · Enter open · s sort · / filter · a {all} · r refresh · q quit")
            }
        };
        let keys = fold_to_line(&keys, self.width);
        self.lines.push(self.style.dim(&keys));
    }
}

/// The columns of a session, each padded; the session's id is shortened where there is little room.
fn pad_columns(cells: &[&str; 9], width: usize) -> String {
    let widths = [9, 14, 4, 7, 5, 7, 8];
    let mut line = String::new();
    for (cell, width) in cells.iter().zip(widths) {
        line.push_str(&pad(cell, width));
        line.push_str("  ");
    }
    let (id, title) = (cells[7], cells[8]);
    // Ids differ in their last characters.
    let shown = match width >= 140 {
        true => pad(id, 32),
        false => pad(
            &id.chars()
                .skip(id.chars().count().saturating_sub(8))
                .collect::<String>(),
            8,
        ),
    };
    line.push_str(&shown);
    line.push_str("  ");
    line.push_str(title);
    line
}

/// Cuts a line that is already clean, keeping the spaces between its columns.
fn fold_line(line: &str, width: usize) -> String {
    let mut left = width;
    let fits = |c: &char| match left.checked_sub(char_width(*c)) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    line.chars()
        .take_while(fits)
        .collect::<String>()
        .trim_end()
        .to_owned()
}
