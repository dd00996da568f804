//! A value that is set once and can be waited for.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

/// Set once; every waiter then has it. Clones share it.
#[derive(Debug)]
pub(super) struct Latch<T>(Arc<Inner<T>>);

#[derive(Debug)]
struct Inner<T> {
    value: OnceLock<T>,
    set: CancellationToken,
}

impl<T> Clone for Latch<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Latch<T> {
    fn default() -> Self {
        Self(Arc::new(Inner {
            value: OnceLock::new(),
            set: CancellationToken::new(),
        }))
    }
}

impl<T: Clone> Latch<T> {
    /// Sets it; the first value stays.
    pub(super) fn set(&self, value: T) {
        let _ = self.0.value.set(value);
        self.0.set.cancel();
    }

    /// What it was set to.
    pub(super) fn get(&self) -> Option<T> {
        self.0.value.get().cloned()
    }

    /// Whether it was set.
    pub(super) fn is_set(&self) -> bool {
        self.0.value.get().is_some()
    }

    /// Waits until it is set.
    pub(super) async fn wait(&self) -> T {
        loop {
            self.0.set.cancelled().await;
            if let Some(value) = self.get() {
                return value;
            }
        }
    }
}
