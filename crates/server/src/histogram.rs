//! Histograms of durations, by labels, in Prometheus text format.

use std::{collections::BTreeMap, fmt::Write as _};

use parking_lot::Mutex;

/// Upper bounds of the buckets, in seconds. From a call within this machine to a turn of an agent.
const BOUNDS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0,
];
/// Maximum number of label sets of one family; what comes past it is counted together as `other`.
const MAX_SERIES: usize = 500;

/// One family of histograms: durations under the same name, told apart by `N` labels.
#[derive(Debug)]
pub(crate) struct DurationHistogram<const N: usize> {
    name: &'static str,
    help: &'static str,
    labels: [&'static str; N],
    series: Mutex<BTreeMap<[String; N], BucketCounts>>,
}

/// How many durations were in each bucket, and their sum.
#[derive(Debug, Clone, Default)]
struct BucketCounts {
    buckets: [u64; BOUNDS.len()],
    count: u64,
    seconds: f64,
}

impl<const N: usize> DurationHistogram<N> {
    /// A family with this name, without values yet.
    pub(crate) fn new(name: &'static str, help: &'static str, labels: [&'static str; N]) -> Self {
        Self {
            name,
            help,
            labels,
            series: Mutex::default(),
        }
    }

    /// Counts a duration. What is not a number, or negative, counts as zero.
    pub(crate) fn observe(&self, labels: [&str; N], seconds: f64) {
        let seconds = if seconds.is_finite() {
            seconds.max(0.0)
        } else {
            0.0
        };
        let mut labels = labels.map(str::to_owned);
        let mut series = self.series.lock();
        if series.len() >= MAX_SERIES && !series.contains_key(&labels) {
            labels = labels.map(|_| "other".to_owned());
        }
        let counts = series.entry(labels).or_default();
        if let Some(bucket) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            counts.buckets[bucket] += 1;
        }
        counts.count += 1;
        counts.seconds += seconds;
    }

    /// Appends the family in Prometheus text format.
    pub(crate) fn write_to(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "# HELP {} {}\n# TYPE {} histogram",
            self.name, self.help, self.name
        );
        let series = self.series.lock().clone();
        for (values, counts) in &series {
            let labels: String = self
                .labels
                .iter()
                .zip(values)
                .map(|(label, value)| format!("{label}=\"{}\",", escape_label(value)))
                .collect();
            let mut below = 0;
            for (bound, count) in BOUNDS.iter().zip(counts.buckets) {
                below += count;
                let _ = writeln!(out, "{}_bucket{{{labels}le=\"{bound}\"}} {below}", self.name);
            }
            let all = labels.trim_end_matches(',');
            let all = if all.is_empty() {
                String::new()
            } else {
                format!("{{{all}}}")
            };
            let _ = writeln!(
                out,
                "{}_bucket{{{labels}le=\"+Inf\"}} {}",
                self.name, counts.count
            );
            let _ = writeln!(out, "{}_sum{all} {}", self.name, counts.seconds);
            let _ = writeln!(out, "{}_count{all} {}", self.name, counts.count);
        }
    }
}

/// A label's value as Prometheus reads it; other control characters become spaces.
pub(crate) fn escape_label(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for c in value.chars().take(200) {
        match c {
            '\\' | '"' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_labels_escaped() {
        let times = DurationHistogram::new("x_seconds", "Test.", ["server"]);
        for seconds in [0.0004, 0.002, 0.002, 1000.0, f64::NAN, -1.0] {
            times.observe(["a\"\n"], seconds);
        }
        let mut text = String::new();
        times.write_to(&mut text);
        for line in [
            "# TYPE x_seconds histogram",
            "x_seconds_bucket{server=\"a\\\" \",le=\"0.0005\"} 3",
            "x_seconds_bucket{server=\"a\\\" \",le=\"0.0025\"} 5",
            "x_seconds_bucket{server=\"a\\\" \",le=\"600\"} 5",
            "x_seconds_bucket{server=\"a\\\" \",le=\"+Inf\"} 6",
            "x_seconds_count{server=\"a\\\" \"} 6",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in {text}");
        }
    }

    #[test]
    fn label_sets_are_bounded() {
        let times = DurationHistogram::new("x_seconds", "Test.", ["server"]);
        for n in 0..2 * MAX_SERIES {
            times.observe([&n.to_string()], 1.0);
        }
        assert_eq!(times.series.lock().len(), MAX_SERIES + 1);
    }
}
