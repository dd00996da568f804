//! A bounded number of threads for one kind of work that takes long, or much stack.
//!
//! The threads of the runtime for blocking work are for everybody: work that an outsider can make long would use them up.
//! They also have 2 MiB of stack, and code that calls itself for each level of an input overflows that on a deep one,
//! which ends the process. Stack that is not used costs no memory, so a thread of its own can have plenty. A thread of
//! this kind does not keep the program from ending.

use std::io;

use tokio::sync::{Semaphore, oneshot};

/// Threads for one kind of work, each made when there is work for it.
#[derive(Debug)]
pub struct WorkerThreads {
    free: Semaphore,
    stack_bytes: usize,
}

impl WorkerThreads {
    /// At most so many threads at once, with so many bytes of stack each.
    pub const fn new(threads: usize, stack_bytes: usize) -> Self {
        Self {
            free: Semaphore::const_new(threads),
            stack_bytes,
        }
    }

    /// Runs blocking work when a thread is free for it. It goes on to its end if the caller stops waiting. An error
    /// means that no thread could be made, or that the work panicked.
    pub async fn run<T: Send + 'static>(
        &'static self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let permit = self.free.acquire().await.map_err(io::Error::other)?;
        let (send, result) = oneshot::channel();
        std::thread::Builder::new()
            .name("worker".into())
            .stack_size(self.stack_bytes)
            .spawn(move || {
                // Held until the work ends, also when its caller no longer waits: the number of threads stays bounded.
                let _permit = permit;
                let _ = send.send(work());
            })?;
        result.await.map_err(|_| io::Error::other("the work panicked"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static THREADS: WorkerThreads = WorkerThreads::new(2, 256 << 20);

    #[tokio::test]
    async fn deep_work_has_room_and_a_panic_is_an_error() {
        fn depth(left: u32) -> u32 {
            let frame = std::hint::black_box([left; 64]);
            if left == 0 {
                frame[0]
            } else {
                1 + depth(frame[63] - 1)
            }
        }
        assert_eq!(THREADS.run(|| depth(100_000)).await.unwrap(), 100_000);
        assert!(THREADS.run(|| panic!("expected in this test")).await.is_err());
        // Its place is free again.
        for _ in 0..4 {
            THREADS.run(|| ()).await.unwrap();
        }
    }
}
