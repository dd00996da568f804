//! `oubliette`: the server and its command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    oubliette_server::answer_shell();
    // The budgets of buffered bytes bound the server's memory only if what is freed is given back.
    oubliette_os::return_large_buffers();
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Nearly all work is waiting for I/O; more threads would only use memory.
        .worker_threads(cores.min(4))
        .max_blocking_threads(64)
        .thread_keep_alive(std::time::Duration::from_secs(5))
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(oubliette_server::run());
            // Do not wait for blocking work, such as packing a file for a client that has disconnected.
            runtime.shutdown_timeout(std::time::Duration::from_millis(500));
            code
        }
        Err(error) => {
            eprintln!("error: starting the async runtime failed: {error}");
            ExitCode::FAILURE
        }
    }
}
