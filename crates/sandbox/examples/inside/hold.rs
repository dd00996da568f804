//! A server, as far as a sandbox can tell: something that holds one, to be killed by a test.

use std::path::PathBuf;

use oubliette_sandbox::{Host, Level, Local, LocalConfig, Sandbox, Spec};
use tokio::io::AsyncReadExt;

pub(crate) fn run(command: &str, args: &[String]) -> bool {
    let minimum = match command {
        "hold-namespaces" => Level::Namespaces,
        "hold-landlock" => Level::Landlock,
        "hold-host" => Level::None,
        _ => return false,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(hold(minimum, PathBuf::from(&args[0]), &args[1]));
    true
}

/// Holds a sandbox with a process and a daemon in it, both with `mark` among their arguments.
async fn hold(level: Level, run_dir: PathBuf, mark: &str) {
    let client = std::env::current_exe().expect("our own program");
    let sandbox: Box<dyn Sandbox> = match level {
        Level::None => Box::new(Host::new(client)),
        Level::Namespaces | Level::Landlock => {
            let bwrap = (level == Level::Landlock).then(|| PathBuf::from("/nonexistent/bwrap"));
            Box::new(
                Local::new(LocalConfig {
                    client,
                    minimum: level,
                    bwrap,
                    run_dir,
                })
                .await
                .expect("a driver"),
            )
        }
    };
    let client = oubliette_sandbox::spec::CLIENT;
    let mut running = sandbox
        .spawn(Spec::new("held", [client, "daemon", "and-stay", mark]))
        .await
        .expect("a sandbox");
    let mut said = [0; 11];
    running.stdout.read_exact(&mut said).await.expect("its word");
    println!("holding");
    std::future::pending::<()>().await;
}
