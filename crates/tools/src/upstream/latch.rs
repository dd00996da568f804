//! A value that is set once and can be awaited.

use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

/// A value that is set once; all waiters then get a clone. Clones of the latch share it.
#[derive(Debug)]
pub(super) struct Latch<T>(Arc<LatchState<T>>);

#[derive(Debug)]
struct LatchState<T> {
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
        Self(Arc::new(LatchState {
            value: OnceLock::new(),
            set: CancellationToken::new(),
        }))
    }
}

impl<T: Clone> Latch<T> {
    /// Sets the value, unless it is set already.
    pub(super) fn set(&self, value: T) {
        let _ = self.0.value.set(value);
        self.0.set.cancel();
    }

    /// The value, if set.
    pub(super) fn get(&self) -> Option<T> {
        self.0.value.get().cloned()
    }

    /// Whether the value is set.
    pub(super) fn is_set(&self) -> bool {
        self.0.value.get().is_some()
    }

    /// Waits until the value is set.
    pub(super) async fn wait(&self) -> T {
        loop {
            self.0.set.cancelled().await;
            if let Some(value) = self.get() {
                return value;
            }
        }
    }
}
