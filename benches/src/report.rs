//! What was measured, what was wanted, and whether it was met.

use serde::Serialize;
use serde_json::Value;

/// What a number should be.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    AtMost(f64),
    AtLeast(f64),
    /// Told for its own sake.
    None,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) suite: &'static str,
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) target: Target,
    pub(crate) met: Option<bool>,
    pub(crate) note: String,
}

/// A table of its own, for what does not fit the one with targets.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Grid {
    pub(crate) title: String,
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    /// The same for programs.
    pub(crate) values: Value,
}

/// Everything of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) rows: Vec<Row>,
    pub(crate) grids: Vec<Grid>,
    /// Suites that did not get to their end, and why.
    pub(crate) broken: Vec<String>,
}

impl Report {
    pub(crate) fn row(
        &mut self,
        suite: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        target: Target,
        note: impl Into<String>,
    ) {
        let met = match target {
            Target::AtMost(most) => Some(value <= most),
            Target::AtLeast(least) => Some(value >= least),
            Target::None => None,
        };
        let row = Row {
            suite,
            what: what.into(),
            value,
            unit,
            target,
            met,
            note: note.into(),
        };
        eprintln!("  {}", line(&row));
        self.rows.push(row);
    }

    /// For people: Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::from("| | measured | target | met | |\n|---|---|---|---|---|\n");
        let mut suite = "";
        for row in &self.rows {
            if row.suite != suite {
                suite = row.suite;
                text += &format!("| **{suite}** | | | | |\n");
            }
            text += &line(row);
            text.push('\n');
        }
        for grid in &self.grids {
            text += &format!(
                "\n{}\n\n| {} |\n|{}\n",
                grid.title,
                grid.head.join(" | "),
                "---|".repeat(grid.head.len())
            );
            for row in &grid.rows {
                text += &format!("| {} |\n", row.join(" | "));
            }
        }
        for why in &self.broken {
            text += &format!("\nNot measured: {why}\n");
        }
        text
    }
}

fn line(row: &Row) -> String {
    let target = match row.target {
        Target::AtMost(most) => format!("≤ {}", shown(most, row.unit)),
        Target::AtLeast(least) => format!("≥ {}", shown(least, row.unit)),
        Target::None => String::new(),
    };
    let met = match row.met {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "",
    };
    format!(
        "| {} | {} | {target} | {met} | {} |",
        row.what,
        shown(row.value, row.unit),
        row.note
    )
}

/// A number as people read it: three digits that matter.
pub(crate) fn shown(value: f64, unit: &str) -> String {
    let number = match value.abs() {
        v if v.is_nan() => "–".to_owned(),
        v if v >= 1000.0 => grouped(value),
        v if v >= 100.0 || (v.fract() == 0.0 && v >= 1.0) => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    };
    match unit {
        "" => number,
        "×" => format!("{number}×"),
        unit => format!("{number} {unit}"),
    }
}

fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0.0 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let seen: Vec<_> = [0.1234, 1.0, 1.234, 12.34, 123.4, 1234.6, 1_234_567.0]
            .map(|v| shown(v, ""))
            .into();
        assert_eq!(seen, ["0.123", "1", "1.23", "12.3", "123", "1,235", "1,234,567"]);
        assert_eq!(
            (shown(2.0, "×"), shown(2.5, "ms")),
            ("2×".into(), "2.50 ms".into())
        );
    }

    #[test]
    fn a_target_is_met_or_it_is_not() {
        let mut report = Report::default();
        report.row("s", "a", 1.0, "ms", Target::AtMost(2.0), "");
        report.row("s", "b", 1.0, "ms", Target::AtLeast(2.0), "");
        report.row("s", "c", 1.0, "ms", Target::None, "");
        let met: Vec<_> = report.rows.iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(true), Some(false), None]);
        assert!(report.markdown().contains("| b | 1 ms | ≥ 2 ms | **no** |"));
    }
}
