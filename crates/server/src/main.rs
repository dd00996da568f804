//! `oubliette`: the server and its command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // More threads than this only hold memory: the work is waiting for others.
        .worker_threads(cores.min(4))
        .max_blocking_threads(64)
        .thread_keep_alive(std::time::Duration::from_secs(5))
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(oubliette_server::cli::run());
            // What still blocks (a file being packed for a client that left) does not hold the exit.
            runtime.shutdown_timeout(std::time::Duration::from_millis(500));
            code
        }
        Err(error) => {
            eprintln!("error: no threads could be started: {error}");
            ExitCode::FAILURE
        }
    }
}
