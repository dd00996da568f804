//! The results: measured values, their targets, and whether they were met.

use serde::Serialize;
use serde_json::Value;

/// The target of a measured value.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BenchTarget {
    AtMost(f64),
    AtLeast(f64),
    /// Reported without a target.
    None,
}

/// One row of the results table.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ReportRow {
    pub(crate) suite: &'static str,
    pub(crate) what: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) target: BenchTarget,
    pub(crate) met: Option<bool>,
    pub(crate) note: String,
}

/// A separate table, for results without targets that have several columns.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ReportTable {
    pub(crate) title: String,
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    /// The same content as JSON, for `--json`.
    pub(crate) values: Value,
}

/// All results of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct BenchReport {
    pub(crate) rows: Vec<ReportRow>,
    pub(crate) grids: Vec<ReportTable>,
    /// Suites that failed, and why.
    pub(crate) broken: Vec<String>,
}

impl BenchReport {
    pub(crate) fn add_row(
        &mut self,
        suite: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        target: BenchTarget,
        note: impl Into<String>,
    ) {
        let met = match target {
            BenchTarget::AtMost(most) => Some(value <= most),
            BenchTarget::AtLeast(least) => Some(value >= least),
            BenchTarget::None => None,
        };
        let row = ReportRow {
            suite,
            what: what.into(),
            value,
            unit,
            target,
            met,
            note: note.into(),
        };
        eprintln!("  {}", markdown_row(&row));
        self.rows.push(row);
    }

    /// The report as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::from("| | measured | target | met | |\n|---|---|---|---|---|\n");
        let mut suite = "";
        for row in &self.rows {
            if row.suite != suite {
                suite = row.suite;
                text += &format!("| **{suite}** | | | | |\n");
            }
            text += &markdown_row(row);
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

fn markdown_row(row: &ReportRow) -> String {
    let target = match row.target {
        BenchTarget::AtMost(most) => format!("≤ {}", format_number(most, row.unit)),
        BenchTarget::AtLeast(least) => format!("≥ {}", format_number(least, row.unit)),
        BenchTarget::None => String::new(),
    };
    let met = match row.met {
        Some(true) => "yes",
        Some(false) => "**no**",
        None => "",
    };
    format!(
        "| {} | {} | {target} | {met} | {} |",
        row.what,
        format_number(row.value, row.unit),
        row.note
    )
}

/// A number with three significant digits, and its unit.
pub(crate) fn format_number(value: f64, unit: &str) -> String {
    let number = match value.abs() {
        v if v.is_nan() => "–".to_owned(),
        v if v >= 1000.0 => group_thousands(value),
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

fn group_thousands(value: f64) -> String {
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
    fn numbers_have_three_significant_digits() {
        let seen: Vec<_> = [0.1234, 1.0, 1.234, 12.34, 123.4, 1234.6, 1_234_567.0]
            .map(|v| format_number(v, ""))
            .into();
        assert_eq!(seen, ["0.123", "1", "1.23", "12.3", "123", "1,235", "1,234,567"]);
        assert_eq!(
            (format_number(2.0, "×"), format_number(2.5, "ms")),
            ("2×".into(), "2.50 ms".into())
        );
    }

    #[test]
    fn rows_record_whether_their_target_is_met() {
        let mut report = BenchReport::default();
        report.add_row("s", "a", 1.0, "ms", BenchTarget::AtMost(2.0), "");
        report.add_row("s", "b", 1.0, "ms", BenchTarget::AtLeast(2.0), "");
        report.add_row("s", "c", 1.0, "ms", BenchTarget::None, "");
        let met: Vec<_> = report.rows.iter().map(|row| row.met).collect();
        assert_eq!(met, [Some(true), Some(false), None]);
        assert!(report.markdown().contains("| b | 1 ms | ≥ 2 ms | **no** |"));
    }
}
