//! Measures how long a sandbox takes to start, compared with bare bubblewrap in the same run:
//! `cargo run --release -p oubliette-sandbox --example spawn_time` (after `--example inside`).

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oubliette_sandbox::{
    IsolationLevel, LocalDriver, LocalDriverConfig, ResourceLimits, SandboxDriver, SandboxSpec,
};

const BARE: &str = "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --uid 1000 --gid 1000 \
                    --die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp true";

#[tokio::main]
async fn main() {
    let count: usize = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(50);
    let client = std::env::args_os().nth(2).map(PathBuf::from).unwrap_or_else(|| {
        std::env::current_exe()
            .expect("our own program")
            .with_file_name("inside")
    });
    let dir = tempfile::tempdir().expect("a directory");
    let config = LocalDriverConfig {
        client,
        minimum: IsolationLevel::Namespaces,
        bwrap: None,
        run_dir: dir.path().join("run"),
    };
    let local = LocalDriver::new(config).await.expect("a driver");
    let begun = Instant::now();
    assert!(local.probe().await.ok, "no sandboxes here");
    println!("probe            {:>8.1?}", begun.elapsed());
    let mut start = Vec::new();
    let mut whole = Vec::new();
    let mut bare = Vec::new();
    for _ in 0..count {
        // Alternating, so that both run under the same load.
        let begun = Instant::now();
        let status = Command::new("bwrap")
            .args(BARE.split_whitespace())
            .stdout(Stdio::null())
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "bare bubblewrap failed"
        );
        bare.push(begun.elapsed());

        let mut spec = SandboxSpec::new("bench", ["true"]);
        spec.workspace = Some(dir.path().to_path_buf());
        if std::env::var_os("NO_LIMITS").is_some() {
            spec.limits = ResourceLimits {
                memory_mb: None,
                cpus: None,
                pids: None,
                workspace_mb: None,
                open_files: None,
            };
        }
        let begun = Instant::now();
        let running = local.spawn(spec).await.expect("a sandbox");
        start.push(begun.elapsed());
        assert!(running.handle.wait().await.success(), "true failed");
        whole.push(begun.elapsed());
    }
    show("bare bwrap, whole", bare);
    show("ours, to start", start);
    show("ours, whole", whole);
}

fn show(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100];
    println!("{name:<18} p50 {:>8.1?}  p95 {:>8.1?}", at(50), at(95));
}
