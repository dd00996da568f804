//! A Kubernetes of one node for the tests (`tests/kubernetes`): `cargo xtask cluster up | image | down`.

use std::{
    fs::File,
    net::{TcpStream, ToSocketAddrs},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Subcommand;

use crate::{
    process::{find_on_path, run},
    setup,
};

/// The image that tests run pods from, made of target/minimal-root.tar.
const TEST_IMAGE: &str = "oubliette-test:latest";
/// What to do where no cluster runs.
const HOW_TO_START: &str = "`cargo xtask cluster up` starts one, KUBECONFIG names another";
/// Programs of the node, and their packages. A path stands for a program that is not on PATH.
const NODE_PACKAGES: [(&str, &str); 5] = [
    ("containerd", "containerd"),
    ("runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("iptables", "iptables"),
    ("ip", "iproute2"),
];
/// What is built of tests/kubernetes: the program's name and its package.
const GO_PROGRAMS: [(&str, &str); 4] = [
    ("cluster", "."),
    ("pause", "./pause"),
    (
        "agent-sandbox-controller",
        "sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller",
    ),
    ("helm", "helm.sh/helm/v3/cmd/helm"),
];
/// How often a condition is asked for.
const POLL: Duration = Duration::from_millis(200);
/// How long the cluster may take to end: killing a process namespace waits for the kernel only.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// What to do with the cluster.
#[derive(Subcommand)]
pub(crate) enum ClusterCommand {
    /// Build and start it in the background, wait until its node is ready, and print the path of its kubeconfig.
    Up,
    /// Import the archive of a root file system as an image.
    Image {
        /// The image's name.
        #[arg(long, default_value = TEST_IMAGE)]
        name: String,
        /// The archive; target/minimal-root.tar if it is left out.
        archive: Option<PathBuf>,
    },
    /// End everything.
    Down,
}

/// Runs one command.
pub(crate) fn run_command(root: &Path, command: ClusterCommand) -> Result<()> {
    match command {
        ClusterCommand::Up => start(root),
        ClusterCommand::Image { name, archive } => {
            let archive = archive.unwrap_or_else(|| root.join("target/minimal-root.tar"));
            import_image(root, &name, &archive)
        }
        ClusterCommand::Down => stop(root),
    }
}

/// The kubeconfig of a cluster that answers: that of KUBECONFIG, or of the one started here. Otherwise what to do.
pub(crate) fn find_running(root: &Path) -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("KUBECONFIG") {
        let named = PathBuf::from(named);
        return match check_answers(&named) {
            Ok(()) => Ok(named),
            Err(why) => Err(format!(
                "the cluster of KUBECONFIG={} is not used: {why:#}",
                named.display()
            )),
        };
    }
    let own = state_dir(root).join("kubeconfig");
    match state_dir(root).join("ready").exists() && check_answers(&own).is_ok() {
        true => Ok(own),
        false => Err(format!("no cluster runs: {HOW_TO_START}")),
    }
}

/// Everything the cluster writes, and its programs in `bin`.
fn state_dir(root: &Path) -> PathBuf {
    root.join("target/cluster")
}

/// An error unless the API server that a kubeconfig names takes connections.
fn check_answers(kubeconfig: &Path) -> Result<()> {
    let text = std::fs::read_to_string(kubeconfig)
        .with_context(|| format!("{} cannot be read", kubeconfig.display()))?;
    let server = text
        .lines()
        .find_map(|line| line.trim().trim_start_matches("- ").strip_prefix("server:"))
        .context("it names no server")?
        .trim()
        .trim_matches('"');
    let (scheme, rest) = server.split_once("://").unwrap_or(("https", server));
    let authority = rest.split('/').next().unwrap_or(rest);
    let has_port = authority
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let authority = match (has_port, scheme) {
        (true, _) => authority.to_owned(),
        (false, "http") => format!("{authority}:80"),
        (false, _) => format!("{authority}:443"),
    };
    let address = authority
        .to_socket_addrs()
        .with_context(|| format!("{server} has no address"))?
        .next()
        .with_context(|| format!("{server} has no address"))?;
    TcpStream::connect_timeout(&address, Duration::from_secs(5))
        .with_context(|| format!("{server} does not answer"))
        .map(drop)
}

fn start(root: &Path) -> Result<()> {
    match find_running(root) {
        Ok(running) => {
            println!("a cluster runs already and is used: {}", running.display());
            return Ok(());
        }
        Err(why) if std::env::var_os("KUBECONFIG").is_some() => {
            bail!("{why}; without KUBECONFIG a cluster is started here");
        }
        Err(_) => {}
    }
    setup::install_system_packages(&NODE_PACKAGES)?;
    build_programs(root)?;
    let state = state_dir(root);
    serve(root, &state)?;
    let image = match setup::make_minimal_root(root) {
        None => import_image(root, TEST_IMAGE, &root.join("target/minimal-root.tar")),
        Some(why) => Err(anyhow::anyhow!(why)),
    };
    if let Err(why) = image {
        eprintln!("pods have no image {TEST_IMAGE}: {why:#}");
    }
    println!("{}", state.join("kubeconfig").display());
    Ok(())
}

/// Builds what the cluster consists of, which takes a quarter of an hour of processor time the first time.
fn build_programs(root: &Path) -> Result<()> {
    if find_on_path("go").is_none() {
        bail!(
            "Go is missing: install 1.26 or later from https://go.dev/dl, or name another cluster with KUBECONFIG"
        );
    }
    let source = root.join("tests/kubernetes");
    let bin = state_dir(root).join("bin");
    std::fs::create_dir_all(&bin)?;
    let link_options = link_options(&source)?;
    println!("building Kubernetes from Go modules into {}", bin.display());
    for (name, package) in GO_PROGRAMS {
        let program = bin.join(name);
        let args = ["-n", "10", "go", "build", "-trimpath", "-buildvcs=false"];
        let status = Command::new("nice")
            .args(args)
            .args(["-ldflags", &link_options, "-o"])
            .args([program.as_os_str(), package.as_ref()])
            // No C compiler is needed then, and the programs run in any image.
            .env("CGO_ENABLED", "0")
            .current_dir(&source)
            .status()
            .context("cannot run go")?;
        if !status.success() {
            bail!("`go build {package}` failed in {} ({status})", source.display());
        }
    }
    Ok(())
}

/// Options of the linker: without debug information, and with the version of Kubernetes, which its own build sets.
fn link_options(source: &Path) -> Result<String> {
    let module = std::fs::read_to_string(source.join("go.mod"))?;
    let version = module
        .lines()
        .find_map(|line| line.trim().strip_prefix("k8s.io/kubernetes "))
        .context("tests/kubernetes/go.mod names no version of Kubernetes")?;
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or("1"), numbers.next().unwrap_or("0"));
    let package = "k8s.io/component-base/version";
    Ok(format!(
        "-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    ))
}

/// Starts the cluster in the background and waits until it is ready.
fn serve(root: &Path, state: &Path) -> Result<()> {
    let kinds = Command::new("go")
        .args(["list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/agent-sandbox"])
        .current_dir(root.join("tests/kubernetes"))
        .output()
        .context("cannot run go")?;
    let kinds = Path::new(String::from_utf8_lossy(&kinds.stdout).trim()).join("k8s/crds");
    let log_path = state.join("cluster.log");
    let log = File::create(&log_path)?;
    let bin = state.join("bin");
    let mut child = Command::new(bin.join("cluster"))
        .arg("serve")
        .arg("--state")
        .arg(state)
        .arg("--pause")
        .arg(bin.join("pause"))
        .arg("--kinds")
        .arg(kinds)
        .arg("--sandbox-controller")
        .arg(bin.join("agent-sandbox-controller"))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        // A group of its own: an interrupt at the terminal ends this command, not the cluster.
        .process_group(0)
        .spawn()
        .context("cannot start the cluster")?;
    println!("starting the cluster; its log is {}", log_path.display());
    while !state.join("ready").exists() {
        if let Some(status) = child.try_wait()? {
            let log = std::fs::read_to_string(&log_path)?;
            bail!("the cluster did not start ({status}):\n{}", log.trim_end());
        }
        sleep(POLL);
    }
    Ok(())
}

fn import_image(root: &Path, name: &str, archive: &Path) -> Result<()> {
    let state = state_dir(root);
    if !state.join("ready").exists() {
        bail!(
            "no cluster was started in {}: `cargo xtask cluster up`",
            state.display()
        );
    }
    if !archive.exists() {
        bail!(
            "{} is missing: `cargo xtask setup` makes target/minimal-root.tar",
            archive.display()
        );
    }
    let program = state.join("bin/cluster").to_string_lossy().into_owned();
    let [state, archive] = [&state, archive].map(|path| path.to_string_lossy().into_owned());
    run(
        root,
        &program,
        &["import", "--state", &state, "--name", name, &archive],
    )?;
    println!(
        "pods can use the image {name}; as it is in no registry, with imagePullPolicy IfNotPresent or Never"
    );
    Ok(())
}

fn stop(root: &Path) -> Result<()> {
    let state = state_dir(root);
    let Ok(pid) = std::fs::read_to_string(state.join("pid")) else {
        println!("no cluster runs in {}", state.display());
        return Ok(());
    };
    let process = Path::new("/proc").join(pid.trim());
    // The id may be another program's by now.
    let is_ours = |process: &Path| {
        std::fs::read_link(process.join("exe")).is_ok_and(|program| program.starts_with(state.join("bin")))
    };
    if is_ours(&process) {
        run(root, "kill", &["-TERM", pid.trim()])?;
        let begin = Instant::now();
        while is_ours(&process) {
            if begin.elapsed() > END_TIMEOUT {
                bail!("process {} does not end", pid.trim());
            }
            sleep(POLL);
        }
    }
    println!("no cluster runs in {}", state.display());
    Ok(())
}
