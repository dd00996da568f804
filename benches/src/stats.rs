//! Many measurements of one thing.

use std::time::Duration;

use anyhow::Result;

use crate::clock;

/// Times, in the order they were taken.
#[derive(Debug, Default, Clone)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn extend(&mut self, more: Times) {
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

    /// How many a second when each follows the one before.
    pub(crate) fn rate(&self) -> f64 {
        let total: Duration = self.0.iter().sum();
        self.0.len() as f64 / total.as_secs_f64()
    }
}

/// In milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Runs something `count` times, one after the other.
pub(crate) async fn timed(count: usize, mut run: impl AsyncFnMut() -> Result<()>) -> Result<Times> {
    let mut times = Times::default();
    for _ in 0..count {
        let begun = clock::now();
        run().await?;
        times.push(clock::since(begun));
    }
    Ok(times)
}

/// Two things in turn, a few of one and a few of the other, so that both see the same machine.
pub(crate) async fn side_by_side(
    rounds: usize,
    each: usize,
    mut a: impl AsyncFnMut() -> Result<()>,
    mut b: impl AsyncFnMut() -> Result<()>,
) -> Result<(Times, Times)> {
    // The first calls open what later ones find open.
    timed(each.min(50), &mut a).await?;
    timed(each.min(50), &mut b).await?;
    let (mut of_a, mut of_b) = (Times::default(), Times::default());
    for _ in 0..rounds {
        of_a.extend(timed(each, &mut a).await?);
        of_b.extend(timed(each, &mut b).await?);
    }
    Ok((of_a, of_b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let mut times = Times::default();
        for n in (0..=100).rev() {
            times.push(Duration::from_millis(n));
        }
        assert_eq!((times.p50(), times.p95(), times.p99()), (50.0, 95.0, 99.0));
        assert!(Times::default().p50().is_nan());
    }
}
