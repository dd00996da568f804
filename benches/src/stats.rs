//! Timing samples and their percentiles.

use std::time::Duration;

use anyhow::Result;

use crate::clock;

/// Measured durations, in the order they were taken.
#[derive(Debug, Default, Clone)]
pub(crate) struct TimingSamples(Vec<Duration>);

impl TimingSamples {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn extend(&mut self, more: TimingSamples) {
        self.0.extend(more.0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The time that `percent` of all do not exceed, in milliseconds.
    pub(crate) fn percentile(&self, percent: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        let at = (last as f64 * percent / 100.0).round() as usize;
        sorted.get(at).map_or(f64::NAN, |time| ms(*time))
    }

    pub(crate) fn p50(&self) -> f64 {
        self.percentile(50.0)
    }

    pub(crate) fn p95(&self) -> f64 {
        self.percentile(95.0)
    }

    pub(crate) fn p99(&self) -> f64 {
        self.percentile(99.0)
    }

    /// Operations per second if each begins when the previous one ends.
    pub(crate) fn rate_per_second(&self) -> f64 {
        let total: Duration = self.0.iter().sum();
        self.0.len() as f64 / total.as_secs_f64()
    }
}

/// A duration in milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Runs and times something `count` times, one after the other.
pub(crate) async fn time_each(
    count: usize,
    mut run: impl AsyncFnMut() -> Result<()>,
) -> Result<TimingSamples> {
    let mut times = TimingSamples::default();
    for _ in 0..count {
        let begun = clock::now();
        run().await?;
        times.push(clock::since(begun));
    }
    Ok(times)
}

/// Times two operations in alternating blocks of `each`, so that both see the same state of the machine.
pub(crate) async fn time_interleaved(
    rounds: usize,
    each: usize,
    mut a: impl AsyncFnMut() -> Result<()>,
    mut b: impl AsyncFnMut() -> Result<()>,
) -> Result<(TimingSamples, TimingSamples)> {
    // Warm-up, not counted: the first calls open connections and fill caches.
    time_each(each.min(50), &mut a).await?;
    time_each(each.min(50), &mut b).await?;
    let (mut of_a, mut of_b) = (TimingSamples::default(), TimingSamples::default());
    for _ in 0..rounds {
        of_a.extend(time_each(each, &mut a).await?);
        of_b.extend(time_each(each, &mut b).await?);
    }
    Ok((of_a, of_b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let mut times = TimingSamples::default();
        for n in (0..=100).rev() {
            times.push(Duration::from_millis(n));
        }
        assert_eq!((times.p50(), times.p95(), times.p99()), (50.0, 95.0, 99.0));
        assert!(TimingSamples::default().p50().is_nan());
    }
}
