//! The sandbox drivers that a configuration asks for.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use oubliette_home::{HomeDir, safe_fs::create_private_dir};
use oubliette_protocol::{Error, Result};
use oubliette_sandbox::{
    DockerDriver, DockerDriverConfig, KubernetesDriver, KubernetesDriverConfig, LocalDriver,
    LocalDriverConfig, SandboxDriver, SandboxError,
};
use oubliette_session::ProgramPaths;

use crate::{
    actions::run_blocking,
    config::{KubernetesConfig, SandboxConfig},
};

/// The drivers of a server.
pub(crate) struct SandboxDrivers {
    /// Of sessions: agents, tool servers and commands.
    pub(crate) sandbox: Arc<dyn SandboxDriver>,
    /// Of what the server itself runs on this machine: git in workspaces, installing packages. The same one if the sessions'
    /// is `local`.
    pub(crate) local: Arc<dyn SandboxDriver>,
}

impl SandboxDrivers {
    /// Opens them. `client` is the path of `oubliette-client`, `run_dir` a directory for sockets and temporary files.
    pub(crate) async fn open(
        home: &HomeDir,
        config: &SandboxConfig,
        client: PathBuf,
        run_dir: PathBuf,
    ) -> Result<Self> {
        let unavailable = |error: SandboxError| Error::unavailable(error.to_string());
        let local = LocalDriverConfig {
            client: client.clone(),
            minimum: config.minimum,
            bwrap: None,
            run_dir: run_dir.clone(),
        };
        let local = LocalDriver::with_total_limits(local, config.total).await;
        let local: Arc<dyn SandboxDriver> = Arc::new(local.map_err(unavailable)?);
        let sandbox: Arc<dyn SandboxDriver> = if let Some(docker) = &config.docker {
            let docker = DockerDriverConfig {
                client,
                run_dir,
                host: docker.host.clone(),
                runtime: docker.runtime.clone(),
                network: docker.network.clone(),
                image: docker.image.clone(),
                grace: config.grace,
            };
            let docker = DockerDriver::new(docker, config.total).await;
            Arc::new(docker.map_err(unavailable)?)
        } else if let Some(cluster) = &config.kubernetes {
            let kubernetes =
                KubernetesDriver::new(kubernetes_driver(cluster, home, client, run_dir, config.grace)).await;
            Arc::new(kubernetes.map_err(unavailable)?)
        } else {
            local.clone()
        };
        Ok(Self { sandbox, local })
    }
}

fn kubernetes_driver(
    cluster: &KubernetesConfig,
    home: &HomeDir,
    client: PathBuf,
    run_dir: PathBuf,
    grace: Duration,
) -> KubernetesDriverConfig {
    let cluster = cluster.clone();
    KubernetesDriverConfig {
        client,
        run_dir,
        home: home.root().to_owned(),
        kubeconfig: cluster.kubeconfig,
        namespace: cluster.namespace,
        image: cluster.image,
        volume_claim: cluster.volume_claim,
        volume_path: cluster.volume_path,
        stage_listen: cluster.stage_listen,
        stage_address: cluster.stage_address,
        runtime_class: cluster.runtime_class,
        network_policy: cluster.network_policy,
        warm_pool: cluster.warm_pool,
        cpu_request: cluster.cpu_request,
        memory_request_mb: cluster.memory_request_mb,
        grace,
    }
}

/// Our own programs at paths from which sandboxes can mount them. A container engine takes the paths of its own machine; of a
/// server that itself runs in a container, that machine has only the home; pods have only the volume on which the home is. So
/// with these drivers the programs are copied into `run_dir`, with any other they stay where they are.
pub(crate) async fn mountable_programs(
    config: &SandboxConfig,
    installed: ProgramPaths,
    run_dir: PathBuf,
) -> Result<ProgramPaths> {
    if !config.has_containers() {
        return Ok(installed);
    }
    let copy = move || {
        let dir = run_dir.join("programs");
        create_private_dir(&dir)?;
        let copy = |program: &Path| {
            copy_program(program, &dir).map_err(|error| {
                let program = program.display();
                let text = format!(
                    "copying {program} to {} for containers failed: {error}",
                    dir.display()
                );
                Error::unavailable(text)
            })
        };
        Ok(ProgramPaths {
            client: copy(&installed.client)?,
            agent: copy(&installed.agent)?,
        })
    };
    run_blocking(copy).await
}

/// Copies a program into a directory unless the same one is there; returns its path. One that is not installed is left to `doctor`
/// and to the sessions that need it: its path is returned as it is.
fn copy_program(program: &Path, dir: &Path) -> io::Result<PathBuf> {
    let installed = match fs::metadata(program) {
        Ok(installed) => installed,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(program.to_owned()),
        Err(error) => return Err(error),
    };
    let Some(name) = program.file_name() else {
        return Ok(program.to_owned());
    };
    let (copy, modified) = (dir.join(name), installed.modified()?);
    let same = |old: fs::Metadata| {
        Ok::<_, io::Error>(old.is_file() && old.len() == installed.len() && old.modified()? == modified)
    };
    if fs::symlink_metadata(&copy).and_then(same).unwrap_or(false) {
        return Ok(copy);
    }
    // Renamed when it is whole: containers that run keep the program they were started with.
    let unfinished = dir.join(format!(".{}.new", name.display()));
    fs::copy(program, &unfinished)?;
    File::options()
        .write(true)
        .open(&unfinished)?
        .set_modified(modified)?;
    fs::rename(&unfinished, &copy)?;
    Ok(copy)
}
