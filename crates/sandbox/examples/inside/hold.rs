//! A stand-in for the server: a process that holds a running sandbox until a test kills it.

use std::path::PathBuf;

use oubliette_sandbox::{
    HostDriver, IsolationLevel, LocalDriver, LocalDriverConfig, SandboxDriver, SandboxSpec,
};
use tokio::io::AsyncReadExt;

pub(crate) fn run(command: &str, args: &[String]) -> bool {
    let minimum = match command {
        "hold-namespaces" => IsolationLevel::Namespaces,
        "hold-landlock" => IsolationLevel::Landlock,
        "hold-host" => IsolationLevel::None,
        _ => return false,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(hold(minimum, PathBuf::from(&args[0]), &args[1], args.get(2)));
    true
}

/// Holds a sandbox in which a program and a daemon run, both with `mark` among their arguments. `bwrap` is used in
/// place of the installed one.
async fn hold(level: IsolationLevel, run_dir: PathBuf, mark: &str, bwrap: Option<&String>) {
    let client = std::env::current_exe().expect("our own program");
    let sandbox: Box<dyn SandboxDriver> = match level {
        IsolationLevel::None => Box::new(HostDriver::new(client)),
        IsolationLevel::Namespaces | IsolationLevel::Landlock => {
            let missing = (level == IsolationLevel::Landlock).then(|| PathBuf::from("/nonexistent/bwrap"));
            Box::new(
                LocalDriver::new(LocalDriverConfig {
                    client,
                    minimum: level,
                    bwrap: bwrap.map(PathBuf::from).or(missing),
                    run_dir,
                })
                .await
                .expect("a driver"),
            )
        }
    };
    let client = oubliette_sandbox::spec::CLIENT;
    let mut running = sandbox
        .spawn(SandboxSpec::new("held", [client, "daemon", "and-stay", mark]))
        .await
        .expect("a sandbox");
    let mut said = [0; 11];
    running.stdout.read_exact(&mut said).await.expect("its word");
    println!("holding");
    std::future::pending::<()>().await;
}
